"""Every method's own samples: the flat layout's gradient against edges or trajectories as rows."""

from dataclasses import replace

import numpy as np
import pytest
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from graphpo_agent.engines.local.engine import LocalEngine
from graphpo_agent.engines.local.loss import Objective
from graphpo_agent.engines.local.options import OptimizerOptions, UpdateOptions
from graphpo_agent.graph.equivalence import find_classes
from graphpo_agent.methods.method import training_sample
from tests.engines.graphs import with_rollout_logprobs
from tests.engines.norms import norm_in_full_precision
from tests.engines.test_gradient import check_update, per_edge_loss
from tests.engines.test_rows import literal_loss
from tests.methods.growing import World, ends_at, grow
from tests.methods.test_contract import ALL, TRAJECTORIES

OBJECTIVE = Objective(clip_low=0.1, clip_high=0.15)


def samples_of(method, count):
    """Of graphs that the method grew where every turn is answered by two tokens."""
    world = World(ends_at(3, finish=0.2), observations=2, tokens=60)
    graphs = [grow(method, world, seed).graph for seed in range(count)]
    graphs = [
        replace(graph, id=f"g{i}", step_scores=np.linspace(0, 1, graph.num_nodes))
        for i, graph in enumerate(graphs)
    ]
    classes = [find_classes(graph, method.merging) for graph in graphs]
    credits = method.assign_credit(graphs, classes)
    return [training_sample(g, credit) for g, credit in zip(graphs, credits, strict=True)]


@pytest.mark.parametrize("name", ALL)
def test_gradient_of_a_methods_samples(make_model, tokenizer, monkeypatch, name):
    monkeypatch.setattr(Qwen2RMSNorm, "forward", norm_in_full_precision)
    model, oracle = make_model(), make_model()
    oracle.set_attn_implementation("sdpa")
    samples = samples_of(ALL[name], 3)
    samples = [with_rollout_logprobs(model, s, 0.3, seed=i) for i, s in enumerate(samples)]
    assert not all(sample.loss_mask[sample.offsets[1] :].all() for sample in samples)
    if name in TRAJECTORIES:
        assert all(sample.rows is not None for sample in samples)
        loss = literal_loss(oracle, samples, OBJECTIVE, "token_mean", 1, None)
    else:
        loss, _ = per_edge_loss(oracle, samples, OBJECTIVE, "token_mean")
    loss.backward()
    engine = LocalEngine(
        model,
        tokenizer,
        OptimizerOptions(max_grad_norm=float("inf"), max_tokens=100),
        UpdateOptions(
            minibatch_graphs=len(samples),
            objective=OBJECTIVE,
            loss_aggregation="token_mean",
            old_logprobs="rollout",
        ),
    )
    metrics = check_update(engine, model, oracle, samples, loss, 1e-12)
    assert metrics["update/clip_fraction"] > 0
