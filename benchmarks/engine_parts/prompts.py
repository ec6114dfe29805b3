"""What prompts begin with alike, such as instructions: computed once, or for every task."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from graphpo_agent.data.toy_model import make_toy_tokenizer
from graphpo_agent.engines.local.beginnings import common_length
from graphpo_agent.engines.local.engine import LocalEngine
from graphpo_agent.engines.local.options import OptimizerOptions, UpdateOptions
from graphpo_agent.engines.tokenizer import HfTokenizer
from graphpo_agent.graph.samples import TrainingSample
from graphpo_agent.rollout.dialects.asearcher import ASearcherDialect
from graphpo_agent.rollout.dialects.base import Dialect
from graphpo_agent.rollout.dialects.hermes import HermesDialect, ToolSignature
from graphpo_agent.rollout.dialects.search_r1 import SearchR1Dialect
from graphpo_agent.rollout.scheduler import complete
from graphpo_agent.types import Prompt, SampleRequest, SamplingParams, Task

from .machine import alternate, machine, table, write_result
from .models import SIZES, make_model, questions
from .update import random_graphs

__all__ = ["run"]

TASKS, PATH = 16, 128
REPEATS = {"0.2M": 11, "5M": 7}
SHAPES: Mapping[str, tuple[int, Sequence[int]]] = {
    "one": (TASKS, (1,)),
    "group": (TASKS // 4, (8,)),
    "graph": (TASKS // 4, (6, 2, 1, 1)),
}
"""How many prompts are trained, and what behind each; all paths are equally long."""


def run(quick: bool, out: Path, command: str) -> None:
    """Measure and write ``engine-prompts``."""
    result: dict[str, Any] = {"command": command, "machine": machine(), "rows": []}
    for name, dialect in dialects().items():
        for size in ("0.2M",) if quick else REPEATS:
            repeats = 1 if quick else REPEATS[size]
            row = {"dialect": name, "model": size} | measure(dialect, size, repeats)
            print(row, flush=True)
            result["rows"].append(row)
    write_result("prompts", result, _page(result), out)


def dialects() -> dict[str, Dialect]:
    """Every protocol with its own prompt; Hermes with three tools."""
    text = {"type": "string", "description": "What to look for, in a few words."}
    lists = {"type": "array", "items": {"type": "string"}, "description": "One or several."}
    tools = [
        ToolSignature("search", "Searches the web and lists ten pages.", _taking(query=lists)),
        ToolSignature("visit", "Visits web pages and shows them.", _taking(url=lists, goal=text)),
        ToolSignature("python", "Runs a program and shows what it prints.", _taking(code=text)),
    ]
    return {
        "search_r1": SearchR1Dialect(),
        "asearcher": ASearcherDialect(),
        "hermes": HermesDialect({tool.name: tool for tool in tools}),
    }


def _taking(**arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": arguments, "required": list(arguments)}


def measure(dialect: Dialect, size: str, repeats: int) -> dict[str, Any]:
    """Prompts as they are, beside the same behind a first token of their own."""
    rendered = [dialect.render(Task(str(i), q, ())) for i, q in enumerate(questions(TASKS))]
    tokenizer = HfTokenizer(make_toy_tokenizer(map(_text, rendered)))
    model = make_model(SIZES[size], [tokenizer.eos_id])
    engine = LocalEngine(model, tokenizer, OptimizerOptions(), UpdateOptions(learning_rate=1e-12))
    prompts = {"shared": [tokenizer.render(prompt) for prompt in rendered]}
    prompts["apart"] = [[first, *ids[1:]] for first, ids in enumerate(prompts["shared"])]
    row: dict[str, Any] = {
        "prompt": float(np.mean([len(ids) for ids in prompts["shared"]])),
        "alike": common_length(min(prompts["shared"]), max(prompts["shared"])),
        "prefilled": {name: _first_tokens(engine, own) for name, own in prompts.items()},
    }
    calls = {name: partial(_first_tokens, engine, own) for name, own in prompts.items()}
    row["first tokens"] = _ratio(calls, repeats)
    for name, (count, schedule) in SHAPES.items():
        graphs = random_graphs(schedule, PATH // len(schedule), 1, count, SIZES[size].vocabulary)
        calls = {
            kind: partial(engine.update, [*map(_behind, own[:count], graphs)], 0)
            for kind, own in prompts.items()
        }
        row[name] = _ratio(calls, repeats)
    return row


def _text(prompt: Prompt) -> str:
    return prompt if isinstance(prompt, str) else "\n".join(one["content"] for one in prompt)


def _first_tokens(engine: LocalEngine, prompts: Sequence[Sequence[int]]) -> int:
    """Draw a token behind every prompt; returns the tokens that were computed for that."""
    policy = engine.policy
    requests = [SampleRequest(policy.open(ids), seed, 1) for seed, ids in enumerate(prompts)]
    complete(policy, requests, SamplingParams())
    policy.release()
    return policy.take_prefilled_tokens()


def _behind(prompt: Sequence[int], graph: TrainingSample) -> TrainingSample:
    """The graph behind another prompt than its own, which has one token."""
    more = len(prompt) - 1
    return replace(
        graph,
        offsets=np.where(np.arange(len(graph.offsets)) > 0, graph.offsets + more, 0),
        token_ids=np.concatenate([prompt, graph.token_ids[1:]]),
        loss_mask=np.concatenate([np.zeros(more, np.bool_), graph.loss_mask]),
        logprobs=np.concatenate([np.full(more, np.nan, np.float32), graph.logprobs]),
    )


def _ratio(calls: Mapping[str, Any], repeats: int) -> float:
    """How many times as long the prompts take that have nothing in common."""
    alternate(calls, repeats=1)  # warms up
    seconds = alternate(calls, repeats)
    return seconds["apart"] / seconds["shared"]


def _page(result: dict[str, Any]) -> list[str]:
    names = {
        "dialect": "prompts of",
        "model": "model",
        "prompt": "tokens of a prompt",
        "alike": "alike in all",
        "computed": "computed of all prompts",
        "first tokens": "first tokens ×",
        "one": "update, 16 × one answer",
        "group": "update, 4 × 8 answers",
        "graph": "update, 4 × {6,2,1,1}",
    }
    shown = [
        row | {"computed": f"{row['prefilled']['shared'] / row['prefilled']['apart']:.0%}"}
        for row in result["rows"]
    ]
    return [
        "# What prompts begin with alike",
        f"The project's own prompt of each protocol, with {TASKS} short questions; a tokenizer of "
        "whole words, random models. Each ratio is the time of the same prompts behind a first "
        "token of their own, which have nothing in common, over the time of the prompts as they "
        "are; CPU seconds of one thread, medians of runs in turn, "
        f"{REPEATS['0.2M']} with 0.2 M parameters and {REPEATS['5M']} with 5 M. *First tokens*: a "
        "token is drawn behind each prompt. *Update*: behind each "
        f"prompt one answer of {PATH} random tokens (as in supervised training), eight, or a graph "
        f"with paths of {PATH} tokens.",
        "",
        *table(shown, names),
    ]
