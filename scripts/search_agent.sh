#!/usr/bin/env bash
# A search agent against a search server: makes the kb world with demonstrations in the Hermes
# dialect, indexes its corpus with Lucene, serves it over HTTP, warm-starts a small policy and
# trains it for five steps. Started again, it goes on from what is complete.
# usage: scripts/search_agent.sh [key=value …]     (overrides of configs/search/toy.yaml)
#   SEED=1          another world, warm start and training
#   KNOBS, SFT      arguments of `graphpo data toy kb` and overrides of the warm start
#   WORLD, RUN      directories; without them those of the seed
#   GRAPHPO         an installed command, instead of setting up .venv
set -euo pipefail
cd "$(dirname "$0")/.."

[ -n "${GRAPHPO:-}" ] || bash scripts/setup.sh lucene
export OMP_WAIT_POLICY=PASSIVE TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
graphpo=${GRAPHPO:-.venv/bin/graphpo}
seed=${SEED:-0}
world=${WORLD:-worlds/search-$seed}
run=${RUN:-runs/search-toy-$seed}
read -ra knobs <<< "${KNOBS:-}"
read -ra sft <<< "${SFT:-}"

echo "== 1/4  the world"
$graphpo data toy kb "$world" dialect=hermes "seed=$seed" "${knobs[@]}"
echo "== 2/4  Lucene index and server"
if $graphpo index info "$world/lucene" > /dev/null 2>&1; then
    echo "the index is there already, delete $world/lucene to build it anew"
else
    $graphpo index build lucene --corpus "$world/corpus.jsonl" --out "$world/lucene"
fi
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
if [ "$(cat "$world/policy-is-of" 2>/dev/null)" = "SFT=${SFT:-}" ]; then
    echo "the policy is there already, delete $world/policy-is-of to train it anew"
else
    $graphpo sft configs/search/toy_sft.yaml "seed=$seed" "model.path=$world/untrained" \
        "demonstrations=$world/demonstrations.jsonl" "output=$world/policy" "${sft[@]}"
    echo "SFT=${SFT:-}" > "$world/policy-is-of"
fi
echo "== 4/4  GraphPO"
how=(configs/search/toy.yaml "seed=$seed" "output=$run" "model.path=$world/policy"
    "tasks.train=$world/train.jsonl" "tasks.heldout=$world/heldout.jsonl")
if compgen -G "$run/checkpoints/step-*/progress.json" > /dev/null; then
    echo "the run goes on from its newest checkpoint, delete $run to begin anew"
    how=(--resume "$run")
fi
$graphpo train "${how[@]}" "mode.tools.search.retriever.urls=http://$(cat "$ready")" "$@"
