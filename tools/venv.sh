#!/bin/sh
# Makes or refreshes .venv with forkyard (editable) and everything its host and tests need.
# Installs python3-venv and a C compiler with apt where they are missing. Does nothing, at
# once, when nothing changed.
set -eu
cd "$(dirname "$0")/.."
venv=.venv
stamp=$venv/.made-from

say() { printf 'setup: %s\n' "$*"; }
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

apt_install() {
    command -v apt-get >/dev/null || die "$* missing, and there is no apt-get here; install it and try again"
    [ "$(id -u)" = 0 ] || die "$* missing; as root: apt-get install $*"
    say "installing $* with apt"
    DEBIAN_FRONTEND=noninteractive apt-get -qq -o Acquire::Retries=3 update </dev/null
    DEBIAN_FRONTEND=noninteractive apt-get -qq -o Acquire::Retries=3 -o Dpkg::Use-Pty=0 install -y --no-install-recommends "$@" </dev/null
}

find_python() {
    for name in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$name"
            return
        fi
    done
}

fingerprint() {
    { "$venv/bin/python" --version; cat pyproject.toml setup.py tools/venv.sh; pwd; } 2>&1 | sha256sum | cut -c1-64
}

python=$(find_python)
[ -n "$python" ] || { apt_install python3 python3-venv; python=$(find_python); }
[ -n "$python" ] || die "needs Python 3.11 or newer; set PYTHON to one"
"$python" -c 'import ensurepip, venv' 2>/dev/null || apt_install python3-venv
if ! echo 'int main(void){return 0;}' | ${CC:-cc} -static -x c -o /dev/null - 2>/dev/null; then
    apt_install gcc libc6-dev
fi

if [ -x "$venv/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$(fingerprint)" ]; then
    "$venv/bin/python" tools/build_agent.py
    say "$venv: already there"
    exit 0
fi
if ! "$venv/bin/python" -c 'import pip' 2>/dev/null; then
    say "making $venv with $("$python" --version)"
    "$python" -m venv --clear "$venv"
fi
say "installing forkyard and its dependencies into $venv"
# Bars where somebody watches, a line for each package in a log.
bars=off
[ -t 1 ] && bars=on
"$venv/bin/python" -m pip install --progress-bar $bars --disable-pip-version-check --no-input -e '.[host,dev]' </dev/null
fingerprint >"$stamp"
say "$venv: done"
