"""Build hook: the wheel carries the guest agent, compiled for the machine that builds it.

Everything else is in pyproject.toml. On systems other than Linux the package is the
client only, and no agent is built.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # setuptools before 70.1
    from wheel.bdist_wheel import bdist_wheel

HERE = Path(__file__).resolve().parent
AGENT = Path("forkyard", "agent", "fy-agent")
WITH_AGENT = sys.platform == "linux"


def load_builder():
    spec = importlib.util.spec_from_file_location("build_agent", HERE / "tools" / "build_agent.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildWithAgent(build_py):
    editable_mode = False

    def _agent(self) -> Path:
        return HERE / "src" / AGENT if self.editable_mode else Path(self.build_lib) / AGENT

    def run(self) -> None:
        super().run()
        if not WITH_AGENT:
            return
        builder = load_builder()
        try:
            builder.build(self._agent().absolute(), force=not self.editable_mode)
        except builder.NoCompilerError as error:
            raise SystemExit(f"error: {error}") from None

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        found = super().get_outputs(include_bytecode)
        return [*found, str(self._agent())] if WITH_AGENT and not self.editable_mode else found


class PlatformWheel(bdist_wheel):
    """The agent fits one processor, but any Python: py3-none-<platform>."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2]) if WITH_AGENT else super().get_tag()


class PlatformDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return WITH_AGENT


setup(
    distclass=PlatformDistribution,
    cmdclass={"build_py": BuildWithAgent, "bdist_wheel": PlatformWheel},
)
