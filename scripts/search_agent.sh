#!/usr/bin/env bash
# A search agent against a search server: makes the kb world with demonstrations in the Hermes
# dialect, indexes its corpus with Lucene, serves it over HTTP, warm-starts a small policy and
# trains it for five steps.
# usage: scripts/search_agent.sh [key=value …]     (overrides of configs/search/toy.yaml)
#   SEED=1          another world, warm start and training
#   KNOBS, SFT      arguments of `graphpo data toy kb` and overrides of the warm start
#   WORLD, RUN      directories
#   GRAPHPO         an installed command, instead of setting up .venv
set -euo pipefail
cd "$(dirname "$0")/.."

[ -n "${GRAPHPO:-}" ] || bash scripts/setup.sh lucene
export OMP_WAIT_POLICY=PASSIVE TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
graphpo=${GRAPHPO:-.venv/bin/graphpo}
seed=${SEED:-0}
world=${WORLD:-worlds/search-$seed}
run=${RUN:-runs/search-toy-$seed}
while [ -z "${RUN:-}" ] && [ -e "$run" ]; do run=$run-again; done
read -ra knobs <<< "${KNOBS:-}"
read -ra sft <<< "${SFT:-}"

echo "== 1/4  the world"
$graphpo data toy kb "$world" dialect=hermes "seed=$seed" "${knobs[@]}"
echo "== 2/4  Lucene index and server"
$graphpo index build lucene --corpus "$world/corpus.jsonl" --out "$world/lucene"
ready=$world/server-address
rm -f "$ready"
$graphpo serve "$world/lucene" --port 0 --ready-file "$ready" &
server=$!
trap 'kill -TERM $server 2>/dev/null; wait $server 2>/dev/null || true' EXIT
until [ -s "$ready" ]; do
    kill -0 $server 2>/dev/null || { echo "the server did not start" >&2; exit 2; }
    sleep 0.2
done
echo "== 3/4  warm start"
$graphpo sft configs/search/toy_sft.yaml "seed=$seed" "model.path=$world/untrained" \
    "demonstrations=$world/demonstrations.jsonl" "output=$world/policy" "${sft[@]}"
echo "== 4/4  GraphPO"
$graphpo train configs/search/toy.yaml "seed=$seed" "output=$run" \
    "model.path=$world/policy" "tasks.train=$world/train.jsonl" \
    "tasks.heldout=$world/heldout.jsonl" \
    "mode.tools.search.retriever.urls=http://$(cat "$ready")" "$@"
