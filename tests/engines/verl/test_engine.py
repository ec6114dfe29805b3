"""verl's engine with rows that share their prefixes against verl's own, row by row."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from benchmarks.engine_parts.verl import row_fields
from graphpo_agent.engines.verl.launch import environment
from graphpo_agent.engines.verl.layout import place_rows
from graphpo_agent.engines.verl.rows import WeightedRow, weighted_rows
from graphpo_agent.engines.verl.shared_rows import text_order
from tests.engines.graphs import partly_idle, random_sample
from tests.engines.tiny import tiny_model, with_vision
from tests.worlds import ROOT

pytestmark = [pytest.mark.verl, pytest.mark.timeout(300)]

VOCABULARY = 40


def fields_of(row: WeightedRow) -> dict[str, list[Any]]:
    """A row as verl's workers see it, with numbers for what other passes would have found."""
    length = len(row.token_ids)
    rng = np.random.default_rng(length)
    found = {
        name: rng.normal(-4.0, 1.0, length - row.prompt_tokens)
        for name in ("old_log_probs", "ref_log_prob")
    }
    return {name: values.tolist() for name, values in (row_fields(row) | found).items()}


def empty_row() -> WeightedRow:
    """What fills a minibatch up."""
    nothing = np.zeros(6)
    return WeightedRow(
        np.full(6, 7), 2, nothing > 0, nothing.astype(np.float32), nothing, nothing[None]
    )


def placed_rows(ranks: int) -> list[list[dict[str, list[Any]]]]:
    """Four graphs, of which two have a prompt in common, as the trainer gives them to the ranks."""
    samples = [
        partly_idle(random_sample(seed, num_nodes=14, vocab_size=VOCABULARY), seed)
        for seed in (1, 2, 3, 3)
    ]
    rows: list[WeightedRow] = []
    added: list[int] = []
    graph: list[int] = []
    for number, sample in enumerate(samples):
        own = weighted_rows(sample, "token_mean", horizon=50).rows
        order, more = text_order([row.token_ids for row in own])
        rows += [own[i] for i in order]
        added += more
        graph += [number] * len(own)
    lengths = [len(row.token_ids) for row in rows]
    order = place_rows(lengths, added, graph, [range(len(samples))], ranks).order
    share = len(order) // ranks
    filled = [fields_of(empty_row() if i is None else rows[i]) for i in order]
    return [filled[rank * share : (rank + 1) * share] for rank in range(ranks)]


def passes(
    place: Path, name: str, family: str, ranks: int, **job: Any
) -> list[dict[str, np.ndarray]]:
    """What each rank found."""
    path = place / f"{name}.json"
    model = place / "model"
    if not model.exists():
        made = tiny_model(family.removesuffix(" with vision"), VOCABULARY)
        whole = with_vision(made) if family.endswith("vision") else made
        whole.float().save_pretrained(model)
    path.write_text(json.dumps({"model": str(model), "ranks": ranks} | job))
    command = [sys.executable, "-m", "tests.engines.verl.engine_rank", str(path)]
    variables = os.environ | environment("cpu", 1.0, shares_prefixes=job["shares"])
    running = [
        subprocess.Popen(
            [*command, str(rank)], cwd=ROOT, env=variables, stderr=subprocess.PIPE, text=True
        )
        for rank in range(ranks)
    ]
    for one in running:
        _, errors = one.communicate(timeout=200)
        assert one.returncode == 0, errors[-3000:]
    return [dict(np.load(f"{path}.{rank}.npz")) for rank in range(ranks)]


def before_trained(rows: list[dict[str, list[Any]]]) -> np.ndarray:
    """[tokens of all rows] whether what is said at a place is of a trained token, the next one."""
    places: list[int] = []
    for row in rows:
        places += [*[0] * (len(row["prompts"]) - 1), *row["response_mask"], 0]
    return np.array(places, bool)


@pytest.mark.parametrize(
    ("family", "rounding", "ranks", "checkpointing"),
    [
        ("qwen2", 1e-5, 1, False),
        ("qwen2", 1e-5, 2, True),
        ("gemma3", 1e-5, 2, True),
        ("qwen3_5", 1e-4, 2, True),
        ("qwen3_5 with vision", 1e-4, 2, True),
        ("granitemoehybrid", 1e-4, 2, True),
        ("falcon_h1", 1e-4, 2, True),
        ("lfm2", 1e-4, 2, True),
    ],
)
def test_shared_prefixes_change_neither_scores_nor_gradients(
    tmp_path: Path, family: str, rounding: float, ranks: int, checkpointing: bool
) -> None:
    job = {"rows": placed_rows(ranks), "checkpointing": checkpointing}
    ours = passes(tmp_path, "shared", family, ranks, shares=True, max_tokens=60, **job)
    verls = passes(tmp_path, "rows", family, ranks, shares=False, max_tokens=10_000, **job)
    assert len({int(one["micro_batches"]) for one in ours}) == 1
    assert ours[0]["micro_batches"] > 1
    for own, theirs, held in zip(ours, verls, job["rows"], strict=True):
        trained = before_trained(held)
        for name in ("log_probs", "entropy"):
            np.testing.assert_allclose(own[name][trained], theirs[name][trained], atol=2 * rounding)
            assert not own[name][~trained].any()
    for name, weight in load_file(tmp_path / "model" / "model.safetensors").items():
        np.testing.assert_array_equal(ours[0][f"served/{name}"], weight)
    total = [sum(float(one["loss"]) for one in found) for found in (ours, verls)]
    assert total[0] == pytest.approx(total[1], rel=1e-5) and abs(total[1]) > 1e-3
    for own, theirs in zip(ours, verls, strict=True):
        names = [name for name in own if name.startswith("gradient/")]
        assert len(names) > 20
        for name in theirs.keys() - own.keys():  # verl computes it, too, and then takes it times 0
            assert ".visual." in name and not theirs[name].any()
        scale = max(float(np.abs(theirs[name]).max()) for name in names)
        assert scale > 1e-2
        for name in names:
            np.testing.assert_allclose(own[name], theirs[name], atol=rounding * scale, err_msg=name)


def test_scores_of_rounded_products_are_not_rounded(tmp_path: Path) -> None:
    job = {"rows": placed_rows(1), "checkpointing": False, "shares": True, "max_tokens": 60}
    (whole,) = passes(tmp_path, "fp32", "qwen2", 1, **job)
    (rounded,) = passes(tmp_path, "bf16", "qwen2", 1, precision="bf16", **job)
    trained = before_trained(job["rows"][0])
    for name in ("log_probs", "entropy"):
        values = torch.from_numpy(rounded[name][trained])
        assert (values != values.bfloat16()).float().mean() > 0.9
        np.testing.assert_allclose(values, whole[name][trained], atol=0.4)
        assert (rounded[name] != whole[name]).any()


def test_adapters_learn_and_are_served_as_the_model_that_they_make(tmp_path: Path) -> None:
    """Against verl's own engine without adapters, on the model that was saved."""
    job = {"rows": placed_rows(2), "checkpointing": True}
    ours = passes(tmp_path, "lora", "qwen2", 2, shares=True, max_tokens=60, lora_rank=2, **job)
    saved = tmp_path / "lora.json.saved" / "huggingface"
    kept = torch.load(
        tmp_path / "lora.json.saved" / "model_world_size_2_rank_0.pt", weights_only=False
    )
    assert kept and all(".lora_" in name for name in kept)
    plain = load_file(tmp_path / "model" / "model.safetensors")
    merged = load_file(saved / "model.safetensors")
    assert merged.keys() == plain.keys()
    shutil.move(tmp_path / "model", tmp_path / "before")
    shutil.copytree(saved, tmp_path / "model")
    verls = passes(tmp_path, "merged", "qwen2", 2, shares=False, max_tokens=10_000, **job)
    for own, theirs, held in zip(ours, verls, job["rows"], strict=True):
        trained = before_trained(held)
        np.testing.assert_allclose(
            own["log_probs"][trained], theirs["log_probs"][trained], atol=2e-4
        )
        assert np.abs(own["bare"][trained] - own["log_probs"][trained]).max() > 0.1
    own, theirs = ours[0], verls[0]
    served = {name.removeprefix("served/") for name in own if name.startswith("served/")}
    assert served >= merged.keys()
    for name, weight in merged.items():
        np.testing.assert_array_equal(own[f"served/{name}"], weight)
    layers = [n.split("/")[1] for n in own if n.startswith("value/") and ".lora_B." in n]
    assert len(layers) == 14, "all linear layers but the head"
    scale = 16 / 2
    rounding = 1e-5 * scale * max(float(np.abs(theirs[n]).max()) for n in theirs if "layers" in n)
    for name in layers:
        layer, inner = name.partition(".lora_B.")[0], name.replace("lora_B", "lora_A")
        outer_values, inner_values = own[f"value/{name}"], own[f"value/{inner}"]
        change = merged[f"{layer}.weight"] - plain[f"{layer}.weight"]
        np.testing.assert_allclose(change, scale * outer_values @ inner_values, atol=1e-6)
        whole = scale * theirs[f"gradient/{layer}.weight"]
        for adapter, expected in ((name, whole @ inner_values.T), (inner, outer_values.T @ whole)):
            np.testing.assert_allclose(own[f"gradient/{adapter}"], expected, atol=rounding)
    assert {name for name in own if name.startswith("gradient/")} == {
        name.replace("value/", "gradient/") for name in own if name.startswith("value/")
    }
