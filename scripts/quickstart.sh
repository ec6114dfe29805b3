#!/usr/bin/env bash
# A search agent that learns by GraphPO, from nothing, on two CPU cores:
# builds the kb world, warm-starts a small policy, trains it, says what it gained.
# usage: scripts/quickstart.sh          (SEED=1 scripts/quickstart.sh for another one)
set -euo pipefail
cd "$(dirname "$0")/.."

bash scripts/setup.sh
export OMP_WAIT_POLICY=PASSIVE TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
graphpo=.venv/bin/graphpo
seed=${SEED:-0}
world=worlds/kb-$seed
run=runs/quickstart-$seed
while [ -e "$run" ]; do run=$run-again; done

echo "== 1/3  the world: facts to search, questions to answer, demonstrations"
$graphpo data toy kb "$world" "seed=$seed"
echo "== 2/3  warm start: the policy imitates a careless demonstrator"
$graphpo sft configs/toy/kb_sft.yaml "seed=$seed" "demonstrations=$world/demonstrations.jsonl" \
    "model.path=$world/untrained" "output=$world/policy"
echo "== 3/3  GraphPO"
$graphpo train configs/toy/kb.yaml "seed=$seed" "output=$run" "model.path=$world/policy" \
    "tasks.train=$world/train.jsonl" "tasks.heldout=$world/heldout.jsonl" \
    "mode.tools.search.retriever.directory=$world/index"
