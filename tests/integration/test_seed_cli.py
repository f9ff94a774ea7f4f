"""An environment with a bug, a grader and three policies, run from shell scripts alone."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from own_yard import OwnYard, own_yard, programs, yard  # noqa: F401

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "demo"))

from wheels import pytest_wheels  # noqa: E402

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.net]

PREPARE = r"""
src=$(forkyard new --name spans-1 --type small --ttl 3600)
echo "$src" > src
tar cf env.tar env
forkyard exec $src "echo $(base64 -w0 env.tar) | base64 -d | tar x && chmod +x env/episode.sh"
forkyard cp wheels $src:wheels
forkyard exec $src --timeout 300 "cd env && python3 -m venv .venv &&
    .venv/bin/pip install -q --no-index --find-links ../wheels pytest && .venv/bin/python -m pytest --version"
forkyard exec $src "cd env && .venv/bin/python grade.py" > baseline.json
forkyard exec $src "rm -f ~/verdict.json; sync"
forkyard snapshot $src spans-env-v1 > snapshot.json
"""

EPISODE = r"""#!/bin/bash
set -e
cd ~/env
cp "policies/$POLICY.py" spans.py
.venv/bin/python grade.py
"""

ROLLOUTS = r"""
snap=spans-env-v1
src=$(cat src)
: > results.txt
number=0
for policy in shallow careful sweeping; do
  number=$((number + 1))
  t0=$(date +%s%N)
  if [ $number -le 2 ]; then
    method=new--from
    id=$(forkyard new --from "$snap" --name "spans-ep$number" --type small --ttl 600 --json |
         jq -r 'select(.event=="ready") | .id')
  else
    method=fork
    forkyard fork "$src" --type small --ttl 600 --wait --json > fork.json
    id=$(jq -r '.id // .sandbox.id' fork.json | head -1)
  fi
  ms=$(( ($(date +%s%N) - t0) / 1000000 ))
  [ $method = fork ] && forkyard rename "$id" --name "spans-ep$number" > /dev/null
  forkyard exec "$id" "test ! -e ~/verdict.json && echo clean-start"
  forkyard exec "$id" "POLICY=$policy ~/env/episode.sh" > /dev/null
  echo "$number $method $id $ms $policy $(forkyard exec "$id" "cat ~/verdict.json")" >> results.txt
  forkyard info "$id" | jq -c '{name: .sandbox.name, memoryRestored: .sandbox.memoryRestored}'
  forkyard delete "$id" --yes > /dev/null && echo "deleted $id"
done
forkyard delete "$src" --yes > /dev/null
forkyard snapshots delete "$snap"
"""


def bash(own: OwnYard, where: Path, script: str) -> str:
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", script], cwd=where, env=own.env, text=True,
                          stdin=subprocess.DEVNULL, capture_output=True, timeout=300, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_scenario(own_yard: OwnYard, tmp_path: Path) -> None:  # noqa: F811
    shutil.copytree(ROOT / "demo" / "env", tmp_path / "env", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "env" / "episode.sh").write_text(EPISODE)
    (tmp_path / "wheels").mkdir()
    own_yard.out("new", "--name", "asked")
    ask = "import sys; print('%d.%d' % sys.version_info[:2])"
    version = own_yard.out("exec", "asked", "python3", "-c", ask)
    own_yard.out("delete", "asked")
    for wheel in pytest_wheels(version):
        shutil.copy(wheel, tmp_path / "wheels")

    assert "pytest 8.3.5" in bash(own_yard, tmp_path, PREPARE)
    baseline = json.loads((tmp_path / "baseline.json").read_text())
    assert (baseline["passed"], baseline["failed"], baseline["reward"]) == (3, 3, 0.5)
    snapshot = json.loads((tmp_path / "snapshot.json").read_text())["snapshot"]
    assert (snapshot["name"], snapshot["status"]) == ("spans-env-v1", "ready")

    said = bash(own_yard, tmp_path, ROLLOUTS).splitlines()
    assert said.count("clean-start") == 3 and sum(line.startswith("deleted sb_") for line in said) == 3
    infos = [json.loads(line) for line in said if line.startswith("{")]
    assert infos == [{"name": f"spans-ep{n}", "memoryRestored": True} for n in (1, 2, 3)]
    rows = [line.split(" ", 5) for line in (tmp_path / "results.txt").read_text().splitlines()]
    assert [row[1] for row in rows] == ["new--from", "new--from", "fork"]
    verdicts = [json.loads(row[5]) for row in rows]
    assert [verdict["reward"] for verdict in verdicts] == [0.667, 1.0, 1.0]
    assert own_yard.names() == []
