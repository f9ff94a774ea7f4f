"""Learning: a small policy whose reward rises, with group rollouts and GRPO's update.

    python examples/learning.py [--steps 20] [--group 8] [--svg curve.svg]

The task: bring a service's settings to what its (hidden) probe wants. The policy is a table of
probabilities, one row for each setting, in numpy. Each step is one group of rollouts of the same
task: every rollout sets all settings in its own fork and is graded in a clean one; the group's
advantages weigh the gradient of the log probability of what was chosen.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from forkyard import Client
from forkyard.rollouts import Episode, Task, group_rollouts
from forkyard.rollouts.graders import CommandGrader

SETTINGS = {
    "workers": ["1", "2", "4", "8"],
    "cache": ["off", "small", "large"],
    "encoding": ["ascii", "latin-1", "utf-8", "utf-16"],
    "retries": ["0", "3", "9"],
    "log": ["debug", "info", "quiet"],
}

# Knows the answer; it is in no copy that a policy had. A point for each setting that fits.
PROBE = """\
import json, os
wanted = {"workers": "4", "cache": "large", "encoding": "utf-8", "retries": "3", "log": "info"}
try:
    given = dict(line.split("=", 1) for line in open("/home/user/service.conf").read().split())
except (OSError, ValueError):
    given = {}
right = sum(given.get(name) == value for name, value in wanted.items())
report = {"reward": right / len(wanted), "passed": right == len(wanted), "end": True}
json.dump(report, open(os.environ["FORKYARD_REPORT"], "w"))
"""
TASK = Task(
    "service",
    instruction="Write the service's settings to service.conf, one name=value a line.",
    files={"service.conf": "".join(f"{name}={values[0]}\n" for name, values in SETTINGS.items())},
    grader=CommandGrader("python3 -I /opt/probe/probe.py", files={"/opt/probe/probe.py": PROBE}),
)


class Table:
    """A softmax for each setting: the policy, and its gradient."""

    def __init__(self) -> None:
        self.logits = [np.zeros(len(values)) for values in SETTINGS.values()]

    def probabilities(self) -> list[np.ndarray]:
        return [np.exp(row - row.max()) / np.exp(row - row.max()).sum() for row in self.logits]

    def __call__(self, episode: Episode) -> list[int]:
        """One rollout: choose, act, return what was chosen as the transcript."""
        rng = np.random.default_rng(episode.seed)
        chosen = [int(rng.choice(len(row), p=row)) for row in self.probabilities()]
        lines = [f"{name}={values[i]}" for (name, values), i in zip(SETTINGS.items(), chosen, strict=True)]
        episode.sandbox.write_file("service.conf", "\n".join(lines) + "\n")
        return chosen

    def update(self, choices: list[list[int]], advantages: list[float], rate: float) -> None:
        """One step up the gradient of the advantages' mean times the log probability."""
        rows = self.probabilities()
        for chosen, advantage in zip(choices, advantages, strict=True):
            for row, probability, i in zip(self.logits, rows, chosen, strict=True):
                row += rate * advantage / len(choices) * ((np.arange(len(row)) == i) - probability)


def learn(client: Client, steps: int, size: int, rate: float, seed: int) -> list[float]:
    """The mean reward of each step's group."""
    policy, curve = Table(), []
    for step in range(steps):
        group = group_rollouts(TASK, policy, size, client=client, run=f"learning-{seed}-{step}")
        valid = [
            (rollout.transcript, advantage)
            for rollout, advantage in zip(group.rollouts, group.advantages, strict=True)
            if rollout.valid and rollout.transcript is not None
        ]
        if not group.no_variance:
            policy.update([chosen for chosen, _ in valid], [worth for _, worth in valid], rate)
        curve.append(group.mean)
        note = "  nothing to learn: all the same" if group.no_variance else ""
        print(f"step {step + 1:3}  reward {group.mean:.3f}  {group.seconds:5.1f} s{note}", flush=True)
    return curve


def as_svg(curve: list[float]) -> str:
    """The rewards by step."""
    width, height, edge = 560, 220, 36
    across = (width - 2 * edge) / max(len(curve) - 1, 1)

    def y(reward: float) -> float:
        return height - edge - reward * (height - 2 * edge)

    points = " ".join(f"{edge + n * across:.1f},{y(reward):.1f}" for n, reward in enumerate(curve))
    marks = "".join(
        f'<path d="M{edge} {y(at):.1f} H{width - edge}" stroke="#8a919b" stroke-opacity="0.3"/>'
        f'<text x="{edge - 8}" y="{y(at) + 4:.1f}" text-anchor="end">{at:g}</text>'
        for at in (0, 0.5, 1)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="12" fill="#8a919b" role="img">'
        f"<title>Mean reward of {len(curve)} groups of rollouts</title>{marks}"
        f'<polyline points="{points}" fill="none" stroke="#2da44e" stroke-width="2"/>'
        f'<text x="{width / 2}" y="{height - 8}" text-anchor="middle">step</text></svg>\n'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--group", type=int, default=8, help="rollouts a step")
    parser.add_argument("--rate", type=float, default=1.5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--svg", type=Path, help="where to draw the curve")
    chosen = parser.parse_args()
    with Client() as client:
        curve: Any = learn(client, chosen.steps, chosen.group, chosen.rate, chosen.seed)
    print(f"mean reward: {curve[0]:.2f} at first, {curve[-1]:.2f} at last")
    if chosen.svg is not None:
        chosen.svg.write_text(as_svg(curve))


if __name__ == "__main__":
    main()
