"""Updates of the local engine: what they report, move and refuse."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from graphpo_agent.engines.local.lora import LoraOptions, add_adapters
from graphpo_agent.engines.local.loss import Objective
from graphpo_agent.engines.local.token_weights import moving_tokens
from graphpo_agent.engines.minibatches import minibatches
from graphpo_agent.errors import GraphError, ModelError
from graphpo_agent.rollout.scheduler import complete
from graphpo_agent.types import SampleRequest, SamplingParams
from tests.engines.graphs import partly_idle, with_rollout_logprobs
from tests.engines.learners import DEMONSTRATIONS, SAMPLES, UPDATING, make_engine, weights_of


def test_metrics_of_an_update_and_the_warm_up(make_model, tokenizer):
    engine = make_engine(make_model(), tokenizer)
    metrics = engine.update(SAMPLES, step=0)
    names = "loss entropy kl clip_fraction grad_norm learning_rate optimizer_steps mismatch"
    assert {name.removeprefix("update/") for name in metrics} == {*names.split(" "), "mismatch_kl"}
    assert all(np.isfinite(value) for value in metrics.values())
    assert metrics["update/learning_rate"] == pytest.approx(0.01 * (1 / 3 + 2 / 3 + 1) / 3)
    assert metrics["update/optimizer_steps"] == 3
    assert engine.update(SAMPLES, step=1)["update/learning_rate"] == pytest.approx(0.01)


def test_an_update_tells_the_share_that_is_done(make_model, tokenizer):
    shares = []
    updating = replace(UPDATING, minibatch_graphs=len(SAMPLES), epochs=2)
    engine = make_engine(make_model(), tokenizer, updating, max_tokens=64)
    engine.update(SAMPLES, 0, shares.append)
    rows = len(shares) // 2
    assert rows > 1 and shares == pytest.approx(np.arange(1, 2 * rows + 1) / (2 * rows))


def test_a_first_minibatch_with_recomputed_logprobs_is_on_policy(make_model, tokenizer):
    updating = replace(UPDATING, minibatch_graphs=len(SAMPLES))
    metrics = make_engine(make_model(), tokenizer, updating).update(SAMPLES, step=0)
    assert metrics["update/kl"] == pytest.approx(0, abs=1e-12)
    assert metrics["update/clip_fraction"] == 0


def test_mismatch_measures_the_samplers_distance(make_model, tokenizer):
    model = make_model()
    exact = [with_rollout_logprobs(model, s, 0.0) for s in SAMPLES]
    drifted = [replace(s, logprobs=s.logprobs + np.float32(0.25)) for s in exact]
    engine = make_engine(model, tokenizer, replace(UPDATING, learning_rate=0.0))
    assert engine.update(exact, 0)["update/mismatch"] < 1e-6
    metrics = engine.update(drifted, 0)
    assert metrics["update/mismatch"] == pytest.approx(0.25, abs=1e-5)
    first = engine.update([drifted[0], *exact[1:]], 0)["update/mismatch"]
    moving = [moving_tokens(s).sum() for s in exact]
    assert first == pytest.approx(0.25 * moving[0] / sum(moving), abs=1e-5)
    divergence = pytest.approx(np.exp(-0.25) - 1 + 0.25, abs=1e-5)
    assert metrics["update/mismatch_kl"] == divergence
    options = replace(UPDATING, learning_rate=0.0, old_logprobs="rollout")
    assert make_engine(model, tokenizer, options).update(drifted, 0)["update/kl"] == divergence


@pytest.mark.parametrize("minibatch_graphs", [1, len(SAMPLES)])
@pytest.mark.parametrize("objective", [Objective(), Objective(kl=0.1, entropy=0.01)])
def test_gains_weigh_what_the_sampler_drew_too_seldom_or_too_often(
    make_model, tokenizer, minibatch_graphs, objective
):
    """As if every edge had its advantage times min(π_old / π_sampler, cap), whatever is learned."""
    model, random = make_model(), np.random.default_rng(0)
    edges = [np.repeat(np.arange(len(s.parent)), np.diff(s.offsets)) for s in SAMPLES]
    exact = [with_rollout_logprobs(model, s, 0.0) for s in SAMPLES]
    drift = [random.normal(0.0, 0.5, len(s.parent)) for s in SAMPLES]
    parts = list(zip(exact, drift, edges, strict=True))
    drifted = [replace(s, logprobs=s.logprobs + d[e].astype(np.float32)) for s, d, e in parts]
    weighed = [replace(s, advantages=s.advantages * np.exp(-d).clip(max=1.5)) for s, d, _ in parts]
    learns = replace(UPDATING, minibatch_graphs=minibatch_graphs, objective=objective)
    results = []
    for samples, cap in ((drifted, 1.5), (weighed, None)):
        engine = make_engine(make_model(), tokenizer, replace(learns, mismatch_cap=cap))
        results.append((engine.update(samples, 0), weights_of(engine.model)))
    (metrics, found), (expected, wanted) = results
    # Adam's first steps go by signs, and the recorded ones are float32.
    assert metrics["update/loss"] == pytest.approx(expected["update/loss"], abs=1e-3)
    assert metrics["update/grad_norm"] == pytest.approx(expected["update/grad_norm"], rel=1e-2)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=5e-3)
    moving = [s.loss_mask if objective.moves_all else moving_tokens(s) for s in exact]
    over = [(np.exp(-d) > 1.5)[e][m] for d, e, m in zip(drift, edges, moving, strict=True)]
    share = pytest.approx(np.concatenate(over).mean())
    assert 0 < metrics["update/mismatch_capped"] == share
    assert "update/mismatch_capped" not in expected


def test_the_sampler_and_the_trainer_agree_on_logprobs(make_model, tokenizer):
    model = make_model()
    engine = make_engine(model, tokenizer, replace(UPDATING, learning_rate=0.0))
    prompt = list(range(5, 15))
    context = engine.policy.open(prompt)
    requests = [SampleRequest(context, seed, 8) for seed in range(4)]
    completions = complete(engine.policy, requests, SamplingParams())
    lengths = [len(prompt), *(len(c.token_ids) for c in completions)]
    sample = replace(
        SAMPLES[0],
        parent=np.array([-1, 0, 0, 0, 0]),
        offsets=np.cumsum([0, *lengths]),
        token_ids=np.array([*prompt, *(i for c in completions for i in c.token_ids)]),
        loss_mask=np.repeat([False, True, True, True, True], lengths),
        logprobs=np.array(
            [np.nan] * len(prompt) + [p for c in completions for p in c.logprobs], np.float32
        ),
        advantages=np.ones((1, 5)),
    )
    assert engine.update([sample], 0)["update/mismatch"] < 1e-6


def test_an_update_raises_what_was_good_and_lowers_what_was_bad(make_model, tokenizer):
    model = make_model()
    engine = make_engine(model, tokenizer, replace(UPDATING, learning_rate=0.002))
    context = engine.policy.open([5, 6, 7])
    drawn = complete(
        engine.policy, [SampleRequest(context, s, 1) for s in range(60)], SamplingParams()
    )
    good = drawn[0].token_ids[0]
    tokens = [c.token_ids[0] for c in drawn]
    assert 0 < tokens.count(good) < 60
    sample = replace(
        SAMPLES[0],
        parent=np.array([-1] + [0] * 60),
        offsets=np.arange(0, 64)[[0, *range(3, 64)]],
        token_ids=np.array([5, 6, 7, *tokens]),
        loss_mask=np.array([False] * 3 + [True] * 60),
        logprobs=np.full(63, np.nan, np.float32),
        advantages=np.array([[np.nan] + [1.0 if t == good else -0.2 for t in tokens]]),
    )

    def probability():
        with torch.no_grad():
            return (
                model(torch.tensor([[5, 6, 7]], device=model.device))
                .logits[0, -1]
                .softmax(-1)[good]
                .item()
            )

    before = probability()
    for step in range(3):
        engine.update([sample], step)
    assert probability() > before


def test_accumulating_rows_gives_the_step_of_one_row(make_model, tokenizer):
    results = []
    for max_tokens in (60, 10_000):
        model = make_model()
        make_engine(model, tokenizer, max_tokens=max_tokens).update(SAMPLES, step=3)
        results.append(weights_of(model))
    for name, value in results[0].items():
        torch.testing.assert_close(value, results[1][name], rtol=0, atol=1e-6)


def test_the_order_of_minibatches_depends_on_seed_and_step_only(make_model, tokenizer):
    def after(seed, step):
        model = make_model()
        make_engine(model, tokenizer, replace(UPDATING, seed=seed)).update(SAMPLES, step)
        return weights_of(model)["model.norm.weight"]

    assert torch.equal(after(5, 0), after(5, 0))
    assert not torch.equal(after(5, 0), after(5, 1))
    assert not torch.equal(after(5, 0), after(6, 0))


def test_a_gradient_that_is_not_finite_is_refused_and_the_weights_stay(make_model, tokenizer):
    model = make_model()
    engine = make_engine(model, tokenizer)
    model.model.norm.weight.register_hook(lambda gradient: gradient * torch.inf)
    before = weights_of(model)
    with pytest.raises(ModelError, match=r"gradient is (inf|nan): the policy has diverged"):
        engine.update(SAMPLES, 0)
    assert all(torch.equal(value, before[name]) for name, value in weights_of(model).items())


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("work", ["update", "imitate"])
def test_gradients_of_work_that_was_interrupted_are_forgotten(
    make_model, tokenizer, work, adapters, offload
):
    def fresh():
        model = make_model()
        if adapters:
            add_adapters(model, LoraOptions(4, 8.0))
        return model, make_engine(model, tokenizer, max_tokens=40, offload=offload)

    def once(engine):
        return engine.update(SAMPLES, 0) if work == "update" else engine.imitate(DEMONSTRATIONS)

    def interrupt(gradient):
        calls.append(gradient)
        if len(calls) == 2:  # after the gradients of the first row
            raise KeyboardInterrupt

    calls = []
    model, interrupted = fresh()
    before = weights_of(model)
    last = next(p for p in reversed(list(model.parameters())) if p.requires_grad)
    handle = last.register_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        once(interrupted)
    handle.remove()
    assert any(p.grad is not None for p in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in weights_of(model).items())
    _, clean = fresh()
    assert once(interrupted) == once(clean)


def test_gradients_are_scaled_down_to_the_asked_norm(make_model, tokenizer):
    model = make_model()
    engine = make_engine(model, tokenizer, max_grad_norm=1e-3)
    norms = []
    engine._optimizer.register_step_pre_hook(
        lambda *_: norms.append(
            torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()
        )
    )
    metrics = engine.update(SAMPLES, 0)
    assert metrics["update/grad_norm"] > 1e-3
    assert max(norms) <= 1e-3 * (1 + 1e-6)


def test_weight_decay_shrinks_matrices_only(make_model, tokenizer):
    model = make_model()
    before = weights_of(model)
    still = [replace(s, advantages=s.advantages * 0) for s in SAMPLES]
    updating = replace(UPDATING, warmup_steps=0, minibatch_graphs=len(SAMPLES))
    make_engine(model, tokenizer, updating, weight_decay=0.5).update(still, 0)
    for name, value in model.named_parameters():
        factor = 1 - 0.01 * 0.5 if value.ndim >= 2 else 1.0
        torch.testing.assert_close(value.detach(), before[name] * factor, rtol=0, atol=1e-9)


def test_epochs_repeat_the_batch_and_leave_the_policy_behind(make_model, tokenizer):
    updating = replace(UPDATING, epochs=3, minibatch_graphs=len(SAMPLES), warmup_steps=0)
    engine = make_engine(make_model(), tokenizer, updating)
    steps = []
    engine._optimizer.register_step_pre_hook(lambda *_: steps.append(1))
    assert engine.update(SAMPLES, 0)["update/kl"] > 0
    assert len(steps) == 3


def test_every_minibatch_is_learned_from_by_itself(make_model, tokenizer):
    """Two of them are two updates of one; graphs without a trained token are in none."""
    updating = replace(UPDATING, minibatch_graphs=1, old_logprobs="rollout")
    samples = [with_rollout_logprobs(make_model(), sample, 0.0) for sample in SAMPLES[:2]]
    silent = replace(SAMPLES[2], loss_mask=np.zeros_like(SAMPLES[2].loss_mask))
    one, other = (make_engine(make_model(), tokenizer, updating) for _ in range(2))
    assert one.update([silent, *samples], 0)["update/optimizer_steps"] == 2
    assert one.update([silent], 0) == {}
    for (i,) in minibatches(2, 1, updating.seed, 0):
        other.update([samples[i]], 0)
    for name, value in weights_of(one.model).items():
        assert torch.equal(value, other.model.state_dict()[name])


def test_missing_rollout_logprobs_are_one_line(make_model, tokenizer):
    blank = replace(SAMPLES[1], logprobs=np.full_like(SAMPLES[1].logprobs, np.nan))
    last = np.arange(len(blank.logprobs)) == np.flatnonzero(moving_tokens(blank))[-1]
    gap = replace(blank, logprobs=np.where(last, np.nan, SAMPLES[1].logprobs))
    engine = make_engine(make_model(), tokenizer, replace(UPDATING, old_logprobs="rollout"))
    for missing in (blank, gap):
        with pytest.raises(GraphError, match=r"graph g1.*recompute"):
            engine.update([SAMPLES[0], missing], 0)
    weighing = make_engine(make_model(), tokenizer, replace(UPDATING, mismatch_cap=2.0))
    with pytest.raises(GraphError, match=r"graph g1.*no mismatch_cap"):
        weighing.update([SAMPLES[0], blank], 0)
    metrics = make_engine(make_model(), tokenizer).update([blank], 0)
    assert "update/mismatch" not in metrics


def test_a_reference_model_is_kept_only_for_a_kl_term(make_model, tokenizer):
    assert make_engine(make_model(), tokenizer)._reference is None
    updating = replace(UPDATING, objective=Objective(kl=0.1))
    engine = make_engine(make_model(), tokenizer, updating)
    metrics = engine.update(SAMPLES, 0)
    assert metrics["update/reference_kl"] >= 0
    for name, value in make_model().state_dict().items():
        assert torch.equal(engine._reference.state_dict()[name], value)


def test_an_update_releases_the_policys_contexts(make_model, tokenizer):
    engine = make_engine(make_model(), tokenizer)
    context = engine.policy.open([5])
    engine.update(SAMPLES, 0)
    with pytest.raises(ValueError, match="released"):
        complete(engine.policy, [SampleRequest(context, 0, 1)], SamplingParams())


def tokens_to_compute(sample, counted):
    """How many tokens one of ``counted`` follows on some path, by definition."""
    needed = 0
    below = {
        v: [u for u in range(len(sample.parent)) if sample.parent[u] == v]
        for v in range(len(sample.parent))
    }

    def any_below(v):
        return any(
            counted[sample.offsets[u] : sample.offsets[u + 1]].any() or any_below(u)
            for u in below[v]
        )

    for v in range(len(sample.parent)):
        own = counted[sample.offsets[v] : sample.offsets[v + 1]]
        for place in range(len(own)):
            needed += own[place + 1 :].any() or any_below(v)
    return int(needed)


@pytest.mark.parametrize("objective", [Objective(), Objective(kl=0.1), Objective(entropy=0.01)])
def test_only_what_leads_to_a_token_that_moves_the_weights_is_computed(
    make_model, tokenizer, objective
):
    model = make_model()
    samples = [partly_idle(sample, seed) for seed, sample in enumerate(SAMPLES)]
    updating = replace(UPDATING, objective=objective, minibatch_graphs=len(samples))
    engine = make_engine(model, tokenizer, updating)
    computed = []

    def count(_, args, kwargs):
        computed.append(kwargs["input_ids"].numel())

    model.base_model.register_forward_pre_hook(count, with_kwargs=True)
    metrics = engine.update(samples, 0)
    by_advantage = sum(tokens_to_compute(s, moving_tokens(s)) for s in samples)
    trained = sum(tokens_to_compute(s, s.loss_mask) for s in samples)
    assert by_advantage < 0.9 * trained
    assert sum(computed) == (by_advantage if objective == Objective() else trained)
    assert np.isfinite(list(metrics.values())).all()


def test_a_minibatch_without_any_advantage_is_a_step_with_a_gradient_of_zero(make_model, tokenizer):
    model = make_model()
    engine = make_engine(model, tokenizer, replace(UPDATING, minibatch_graphs=len(SAMPLES)))
    engine.update(SAMPLES, 0)
    weights = list(model.parameters())
    state = engine._optimizer.state
    moments = [state[weight]["exp_avg"].clone() for weight in weights]
    before = [weight.detach().clone() for weight in weights]
    idle = [replace(sample, advantages=sample.advantages * 0.0) for sample in SAMPLES]
    metrics = engine.update(idle, 1)
    assert metrics["update/grad_norm"] == 0.0 and metrics["update/optimizer_steps"] == 1.0
    for weight, moment, old in zip(weights, moments, before, strict=True):
        torch.testing.assert_close(state[weight]["exp_avg"], 0.9 * moment)
        assert not torch.equal(weight, old)
