"""Gymnasium environments whose episodes start from one frozen state of a machine.

Needs gymnasium (the extra ``forkyard[gymnasium]``). ``reset`` is a rewind: programs, memory and
files are back where they were, whatever the last episode did to them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from forkyard.client.sync import Client
from forkyard.client.sync_sandbox import Sandbox
from forkyard.errors import InvalidRequestError, NotFoundError, SandboxLostError, UnsupportedError
from forkyard.rollouts.gone import find_loss

try:
    import gymnasium
    from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate
except ImportError as error:
    raise UnsupportedError(
        f"forkyard.rollouts.envs needs gymnasium: {error}", hint="pip install 'forkyard[gymnasium]'"
    ) from error

Info = dict[str, Any]
# begin(sandbox, rng, options) -> observation, info
Begin = Callable[[Sandbox, np.random.Generator, Info], tuple[Any, Info]]
# act(sandbox, action) -> observation, reward, terminated, info
Act = Callable[[Sandbox, Any], tuple[Any, float, bool, Info]]


class Start:
    """The frozen state that episodes start from. A sandbox is frozen once and not changed."""

    def __init__(self, client: Client, source: str) -> None:
        self.client = client
        self.source = source
        self._own: str | None = None
        self._inherit: Info = {}
        try:
            info = client.get_sandbox(source)
        except NotFoundError:
            return
        self.source = self._own = client.snapshot(info.id).id
        self._inherit = {
            "egress": None if info.egress == "allow" else info.egress,
            "egress_allow": info.egress_allow or None,
            "labels": info.labels,
        }

    def fork(self, n: int) -> list[str]:
        """Ids of so many sandboxes in it; they go with this process."""
        return [info.id for info in self.client.fork(self.source, n, ephemeral=True, **self._inherit).forks]

    def close(self) -> None:
        """Delete what was frozen here; nothing that started from it may run any more."""
        if self._own is not None:
            self.client.delete_snapshot(self._own)
            self._own = None


class SandboxEnv(gymnasium.Env[Any, Any]):
    """One sandbox as an environment.

    Args:
        source: What episodes start from: a sandbox, snapshot, checkpoint or template.
        begin: Called after each reset; draws whatever is random from the generator it is given.
        act: Does an action and says what came of it.
        max_steps: Truncates longer episodes.
        start: Of several environments that share one; closing it is then the caller's.

    A sandbox that an action destroyed ends the episode with reward 0 and ``info["lost"]``; the
    observation is the one before.
    """

    metadata: Info = {"render_modes": []}

    def __init__(
        self,
        client: Client,
        source: str,
        begin: Begin,
        act: Act,
        *,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        max_steps: int | None = None,
        start: Start | None = None,
        sandbox: str | None = None,
    ) -> None:
        if max_steps is not None and max_steps < 1:
            raise InvalidRequestError(f"max_steps={max_steps}", hint="1 or more, or None")
        self.observation_space = observation_space
        self.action_space = action_space
        self.render_mode = None
        self._client = client
        self._begin = begin
        self._act = act
        self._max_steps = max_steps
        self._own_start = start is None
        self._start = start or Start(client, source)
        self._sandbox = sandbox
        self._checkpoint: str | None = None
        self._steps = 0
        self._last: Any = None

    @property
    def sandbox(self) -> Sandbox:
        """The episode's sandbox.

        Raises:
            InvalidRequestError: there is none before the first reset and after close.
        """
        if self._sandbox is None:
            raise InvalidRequestError("the environment has no sandbox now", hint="call reset() first")
        return self._client.sandbox(self._sandbox)

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Any, Info]:
        """Back to the start."""
        super().reset(seed=seed)
        self._to_start()
        self._steps = 0
        self._last, info = self._begin(self.sandbox, self.np_random, dict(options or {}))
        return self._last, info

    def _to_start(self) -> None:
        if self._sandbox is not None and self._checkpoint is not None:
            try:
                self._client.rewind(self._sandbox, to=self._checkpoint)
                return
            except (NotFoundError, SandboxLostError):
                # The last episode destroyed it.
                self._client.delete_sandbox(self._sandbox)
                self._sandbox = None
        if self._sandbox is None:
            self._sandbox = self._start.fork(1)[0]
        self._checkpoint = self._client.checkpoint(self._sandbox).id

    def step(self, action: Any) -> tuple[Any, float, bool, bool, Info]:
        """One action."""
        self._steps += 1
        try:
            self._last, reward, terminated, info = self._act(self.sandbox, action)
        except (SandboxLostError, NotFoundError) as error:
            lost = find_loss(self._client, self.sandbox.id, error)
            if lost is None or lost.host:
                raise
            reward, terminated, info = 0.0, True, {"lost": lost.message}
        truncated = not terminated and self._max_steps is not None and self._steps >= self._max_steps
        return self._last, float(reward), bool(terminated), truncated, info

    def close(self) -> None:
        """Delete the sandbox, and the frozen state if it is this environment's own."""
        if self._sandbox is not None:
            self._client.delete_sandbox(self._sandbox)
            self._sandbox = self._checkpoint = None
        if self._own_start:
            self._start.close()


class SandboxVectorEnv(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """``num_envs`` environments over forks of one state, all of which act at the same time.

    An environment whose episode has ended is reset by the next ``step``, whose action it ignores
    (``AutoresetMode.NEXT_STEP``). Arguments as :class:`SandboxEnv`, whose forks are made in one call.
    """

    def __init__(
        self,
        client: Client,
        source: str,
        num_envs: int,
        begin: Begin,
        act: Act,
        *,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        max_steps: int | None = None,
    ) -> None:
        if num_envs < 1:
            raise InvalidRequestError(f"num_envs={num_envs}", hint="1 or more")
        self.metadata = {**SandboxEnv.metadata, "autoreset_mode": gymnasium.vector.AutoresetMode.NEXT_STEP}
        self.num_envs = num_envs
        self.single_observation_space = observation_space
        self.single_action_space = action_space
        self.observation_space = batch_space(observation_space, num_envs)
        self.action_space = batch_space(action_space, num_envs)
        self._start = Start(client, source)
        try:
            sandboxes = self._start.fork(num_envs)
        except BaseException:
            self._start.close()
            raise
        self.envs = [
            SandboxEnv(
                *(client, source, begin, act),
                observation_space=observation_space,
                action_space=action_space,
                max_steps=max_steps,
                start=self._start,
                sandbox=sandbox,
            )
            for sandbox in sandboxes
        ]
        self._ended = np.zeros(num_envs, dtype=bool)
        # Each environment blocks in calls of its own; closed with this object.
        self._threads = ThreadPoolExecutor(num_envs, thread_name_prefix="forkyard-env")

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: Info | None = None
    ) -> tuple[Any, Info]:
        """Rewind all of them. A seed n gives them n, n + 1, ..."""
        seeds = [seed] * self.num_envs if seed is None else seed
        if isinstance(seeds, int):
            seeds = [seeds + number for number in range(self.num_envs)]
        if len(seeds) != self.num_envs:
            raise InvalidRequestError(f"{len(seeds)} seeds for {self.num_envs} environments")
        done = list(
            self._threads.map(lambda env, one: env.reset(seed=one, options=options), self.envs, seeds)
        )
        self._ended[:] = False
        return self._observed([observation for observation, _ in done]), self._told([i for _, i in done])

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, Info]:
        """One action each, at the same time."""

        def one(number: int, action: Any) -> tuple[Any, float, bool, bool, Info]:
            if self._ended[number]:
                observation, info = self.envs[number].reset()
                return observation, 0.0, False, False, info
            return self.envs[number].step(action)

        done = list(self._threads.map(one, range(self.num_envs), iterate(self.action_space, actions)))
        observations, rewards, terminated, truncated, infos = zip(*done, strict=True)
        self._ended = np.logical_or(terminated, truncated)
        return (
            self._observed(observations),
            np.array(rewards, dtype=np.float64),
            np.array(terminated, dtype=bool),
            np.array(truncated, dtype=bool),
            self._told(infos),
        )

    def _observed(self, observations: Sequence[Any]) -> Any:
        empty: Any = create_empty_array(self.single_observation_space, self.num_envs)
        return concatenate(self.single_observation_space, observations, empty)

    def _told(self, infos: Sequence[Info]) -> Info:
        told: Info = {}
        for number, info in enumerate(infos):
            told = self._add_info(told, info, number)
        return told

    def close_extras(self, **kwargs: Any) -> None:
        """Delete the forks and the frozen state."""
        list(self._threads.map(lambda env: env.close(), self.envs))
        self._threads.shutdown()
        self._start.close()
