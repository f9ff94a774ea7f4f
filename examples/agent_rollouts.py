"""Eight rollouts of an agent of the OpenAI Agents SDK, a hidden grader, and what each came to.

    python examples/agent_rollouts.py [--svg rewards.svg]

The model is scripted, so that this runs anywhere: put a real one in its place. It looks, edits and
runs the visible test; of four scripts one repairs the function for every input, the others for the
inputs that they saw. The grader's tests are in no copy that an agent has.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from agents import Agent, Runner
from agents.testing import ScriptedModel, assistant_message, function_call

from forkyard import Client
from forkyard.integrations.openai_agents import sandbox_tools
from forkyard.rollouts import CommandGrader, Episode, Report, Task, evaluate

BUGGY = "def slug(text):\n    return text.lower().replace(' ', '-')\n"
ANSWERS = [
    "import re\n\ndef slug(text):\n    return re.sub(r'[^a-z0-9]+', '-', text.lower()).strip('-')\n",
    "def slug(text):\n    return text.lower().replace(' ', '-').replace('?', '')\n",
    "def slug(text):\n    return 'what-now'\n",
    "def slug(text):\n    return text.strip('?').lower().replace(' ', '-')\n",
]
VISIBLE = "from slugs import slug\nassert slug('What now?') == 'what-now', slug('What now?')\n"
HIDDEN = """
import json, os, subprocess, sys

CASES = {"One Two": "one-two", "What now?": "what-now", " What? Now! ": "what-now", "a -- b": "a-b"}
program = "import sys; from slugs import slug; print(slug(sys.argv[1]))"
right = 0
for text, wanted in CASES.items():
    ran = subprocess.run(["python3", "-c", program, text], user="nobody", capture_output=True, text=True)
    right += ran.stdout == wanted + "\\n"
report = {"end": True, "reward": right / len(CASES), "message": f"{right} of {len(CASES)} are right"}
with open(os.environ["FORKYARD_REPORT"], "w") as file:
    json.dump(report, file)
"""
GRADER = "/var/lib/forkyard-grader/private/hidden.py"
TASK = Task(
    "slugs",
    instruction="slug() in slugs.py leaves marks in: repair it. python3 visible.py has to pass.",
    files={"slugs.py": BUGGY, "visible.py": VISIBLE},
    grader=CommandGrader(["python3", GRADER], files={GRADER: HIDDEN}),
    paths=("slugs.py",),
)


def model(number: int) -> ScriptedModel:
    """Stands in for a model that answers differently each time."""
    answer = ANSWERS[number % len(ANSWERS)]
    return ScriptedModel(
        [
            [function_call("shell", {"command": "cat slugs.py; python3 visible.py"}, call_id="1")],
            [function_call("write_file", {"path": "slugs.py", "content": answer}, call_id="2")],
            [function_call("shell", {"command": "python3 visible.py && echo passes"}, call_id="3")],
            [assistant_message("It is repaired.")],
        ]
    )


def policy(episode: Episode) -> dict[str, Any]:
    sandbox = episode.sandbox
    agent = Agent(
        name="solver",
        instructions=episode.task.instruction,
        model=model(episode.sample),
        tools=sandbox_tools(sandbox.client, sandbox.id, timeout_s=60),
    )
    done = Runner.run_sync(agent, "Go on.", max_turns=10)
    outputs = [item.output for item in done.new_items if item.type == "tool_call_output_item"]
    return {"said": done.final_output, "outputs": outputs}


def run(client: Client, samples: int = 8) -> Report:
    report: Report = evaluate(
        [TASK], policy, samples=samples, ks=(1, 4), client=client, version="1", progress=False
    )
    return report


def as_svg(report: Report) -> str:
    """A bar a rollout: its reward."""
    width, step, left = 560, 24, 130
    rows = []
    for at, sample in enumerate(report.samples):
        wide = (width - left - 60) * sample.reward
        colour = "#2da44e" if sample.outcome == "passed" else "#d1463b"
        rows.append(
            f'<text x="{left - 8}" y="{at * step + 20}" text-anchor="end">rollout {sample.sample}</text>'
            f'<rect x="{left}" y="{at * step + 8}" width="{max(wide, 1):.0f}" height="16" fill="{colour}"/>'
            f'<text x="{left + wide + 8:.0f}" y="{at * step + 20}">{sample.reward:.2f}</text>'
        )
    height = step * len(rows) + 16
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="12" fill="#8a919b" role="img">'
        f"<title>The rewards of {len(rows)} rollouts</title>{''.join(rows)}</svg>\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--svg", type=Path, help="where to draw the rewards")
    chosen = parser.parse_args()
    with Client() as client:
        report = run(client)
        for sample in report.samples:
            passes = report.transcript(sample)["outputs"][-1].endswith("passes")
            seen = "passes" if passes else "fails"
            print(
                f"rollout {sample.sample}  visible test {seen:6}  reward {sample.reward:.2f}", sample.message
            )
        print(report)
    if chosen.svg is not None:
        chosen.svg.write_text(as_svg(report))


if __name__ == "__main__":
    main()
