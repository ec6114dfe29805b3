"""The update through verl's FSDP engine: rows that share their prefixes, and verl's own rows."""

import os
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from graphpo_agent.engines.verl.launch import environment
from graphpo_agent.engines.verl.rows import WeightedRow, weighted_rows
from graphpo_agent.graph.samples import TrainingSample

from .machine import alternate, machine, table, write_result
from .models import SIZES, make_model
from .update import SCHEDULES, packed_pass, random_graphs, token_data, works

__all__ = ["make_engine", "make_loss", "row_batch", "row_fields", "run"]

PROMPT = 64
MAX_TOKENS = (4096, 16384)
"""Micro-batches, of which the fastest counts."""
LIMIT = 6.0e11
"""Cases that take more operations over the paths are left out."""
_WHOLE = ("input_ids", "position_ids", "prompts", "responses", "response_mask")
"""Fields of whole numbers."""


def make_engine(
    model: str,
    shares: bool,
    checkpointing: bool = False,
    lora_rank: int = 0,
    precision: str = "fp32",
) -> Any:
    """An FSDP2 engine of verl's, ours or its own, in a process group that is there.

    Args:
        model: directory.
        shares: whether it is ours, whose rows share their prefixes.
        checkpointing: whether layers are computed again in the backward pass.
        lora_rank: of adapters; 0 for none.
        precision: in which matrices are multiplied.
    """
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine import EngineRegistry

    os.environ.pop("VERL_ENGINE_VENDOR", None)
    os.environ.update(environment("cpu", 1.0, shares))
    engine = EngineRegistry.new(
        model_type="language_model",
        backend="fsdp2",
        model_config=HFModelConfig(
            path=model,
            load_tokenizer=False,
            external_lib="graphpo_agent.engines.verl.engine",
            override_config={"attn_implementation": "sdpa"},
            enable_gradient_checkpointing=checkpointing,
            use_remove_padding=False,
            lora_rank=lora_rank,
            lora={"merge": True},
        ),
        engine_config=FSDPEngineConfig(
            strategy="fsdp2",
            model_dtype="fp32",
            mixed_precision={"param_dtype": precision, "reduce_dtype": "fp32"},
            use_torch_compile=False,
        ),
        optimizer_config=FSDPOptimizerConfig(lr=1e-3, total_training_steps=10),
        checkpoint_config=CheckpointConfig(save_lora_only=True),
    )
    engine.initialize()
    return engine


def make_loss(kl: float = 0.0, entropy: float = 0.0) -> Any:
    """The loss function of a run through verl, with one advantage term."""
    from verl.workers.config import FSDPActorConfig

    from graphpo_agent.engines.verl.loss import LossTerms, graph_loss

    actor = FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        ppo_mini_batch_size=8,
        ppo_micro_batch_size_per_gpu=8,
        clip_ratio_c=1e9,
    )
    return partial(graph_loss, actor, LossTerms(("advantages",), kl, entropy))


def row_batch(rows: Sequence[dict[str, Any]], **settings: Any) -> Any:
    """Rows as verl's workers are given them.

    Args:
        rows: of each its tokens and, by name, the numbers of its response tokens.
        **settings: verl's of the pass, such as ``max_token_len_per_gpu``.
    """
    import verl.utils.tensordict_utils as tu
    from tensordict import TensorDict

    def nested(name: str) -> Tensor:
        values = [torch.as_tensor(np.array(row[name])) for row in rows]
        if name not in _WHOLE:
            values = [value.float() for value in values]
        return torch.nested.as_nested_tensor(values, layout=torch.jagged)

    data = TensorDict({name: nested(name) for name in rows[0]}, batch_size=len(rows))
    data["loss_mask"] = data["response_mask"]
    tu.assign_non_tensor(data, use_dynamic_bsz=True, use_remove_padding=False, **settings)
    return data


def row_fields(row: WeightedRow) -> dict[str, Any]:
    """A row for ``row_batch``, drawn by the policy that is updated."""
    start = row.prompt_tokens
    return {
        "input_ids": row.token_ids,
        "position_ids": np.arange(len(row.token_ids)),
        "prompts": row.token_ids[:start],
        "responses": row.token_ids[start:],
        "response_mask": row.loss_mask[start:].astype(np.int64),
        "token_weights": row.weights[start:],
        "advantages": row.advantages[0, start:],
        "old_log_probs": np.nan_to_num(row.logprobs[start:]),
    }


def run(quick: bool, out: Path, command: str) -> None:
    """Measure and write ``engine-verl``."""
    os.environ.update(environment("cpu", 1.0, shares_prefixes=True))
    import verl  # noqa: F401  (loads our CPU platform)

    result: dict[str, Any] = {"command": command, "machine": machine(), "rows": []}
    with tempfile.TemporaryDirectory() as scratch:
        torch.distributed.init_process_group(
            "gloo", f"file://{scratch}/store", rank=0, world_size=1
        )
        for size in ("0.2M",) if quick else ("0.2M", "5M"):
            model = make_model(SIZES[size])
            model.save_pretrained(f"{scratch}/{size}")
            engines = {
                "shared": make_engine(f"{scratch}/{size}", shares=True),
                "rows": make_engine(f"{scratch}/{size}", shares=False),
            }
            for schedule in SCHEDULES:
                for segment in (8,) if quick else (8, 32):
                    graphs = 4 if size == "0.2M" and not quick else 1
                    samples = random_graphs(
                        SCHEDULES[schedule], segment, PROMPT, graphs, SIZES[size].vocabulary
                    )
                    work = works(SIZES[size], samples)
                    if work["paths"].flops > LIMIT:
                        continue
                    measured = measure(engines, model, samples)
                    row = {"model": size, "schedule": schedule, "segment": segment} | measured
                    row["graphs"] = graphs
                    row["tokens"] = work["paths"].tokens / work["packed"].tokens
                    print(row, flush=True)
                    result["rows"].append(row)
        torch.distributed.destroy_process_group()
    write_result("verl", result, _page(result), out)


def measure(
    engines: dict[str, Any], model: Any, samples: Sequence[TrainingSample]
) -> dict[str, Any]:
    """CPU seconds of a forward and backward pass over a minibatch through each engine."""
    loss = make_loss()
    rows = [row for one in samples for row in weighted_rows(one, "edge_mean", horizon=1).rows]
    fields = [row_fields(row) for row in rows]
    calls: dict[str, Any] = {}
    for name, engine in engines.items():
        trials = {str(n): partial(_pass, engine, fields, loss, n) for n in MAX_TOKENS}
        times = alternate(trials, repeats=1)
        calls[name] = trials[min(times, key=lambda n: times[n])]
    data = token_data(samples)
    calls["local"] = partial(packed_pass, model, samples, data, max(MAX_TOKENS))
    calls["local"]()
    seconds = alternate(calls, repeats=3)
    model.zero_grad()
    return {
        "seconds": seconds,
        "rows over shared": seconds["rows"] / seconds["shared"],
        "shared over local": seconds["shared"] / seconds["local"],
    }


def _pass(engine: Any, fields: Sequence[dict[str, Any]], loss: Any, max_tokens: int) -> None:
    settings = {"max_token_len_per_gpu": max_tokens, "temperature": 1.0}
    with engine.train_mode():
        engine.forward_backward_batch(row_batch(fields, **settings), loss)


def _page(result: dict[str, Any]) -> list[str]:
    names = {
        "model": "model",
        "schedule": "schedule",
        "segment": "segment",
        "graphs": "graphs",
        "tokens": "tokens ×",
        "rows s": "verl's rows (s)",
        "shared s": "shared (s)",
        "rows over shared": "rows over shared ×",
        "local s": "local engine (s)",
        "shared over local": "shared over local ×",
    }
    shown = [
        row | {f"{name} s": seconds for name, seconds in row["seconds"].items()}
        for row in result["rows"]
    ]
    return [
        "# The update through verl: rows that share their prefixes",
        "Forward and backward pass of one minibatch of random graphs through verl 0.9.1's FSDP2 "
        "engine on one rank (gloo, float32), CPU seconds of one thread, medians of three runs in "
        "turn. *Rows*: verl's engine as it is, one row per path, padded, each micro-batch of the "
        f"fastest of {', '.join(map(str, MAX_TOKENS))} tokens; on a GPU it does not pad. *Shared*: "
        "this project's engine (`engine.share_prefixes`), the same rows, settings and loss. "
        "*Tokens ×*: those of the paths over those of the graphs. *Local engine*: the same graphs "
        "without verl.",
        "",
        *table(shown, names),
    ]
