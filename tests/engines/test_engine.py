import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from graphpo_agent.engines.local.demonstrations import demonstration_sample
from graphpo_agent.engines.local.engine import LocalEngine
from graphpo_agent.engines.local.lora import LoraOptions, add_adapters
from graphpo_agent.engines.local.loss import Objective
from graphpo_agent.engines.local.model import load_model
from graphpo_agent.engines.local.options import (
    ComputeOptions,
    ImitationOptions,
    OptimizerOptions,
    UpdateOptions,
)
from graphpo_agent.engines.local.token_weights import moving_tokens
from graphpo_agent.engines.minibatches import minibatches
from graphpo_agent.engines.tokenizer import HfTokenizer
from graphpo_agent.errors import DataError, GraphError, ModelError, RunError
from graphpo_agent.rollout.scheduler import complete
from graphpo_agent.types import Demonstration, Piece, SampleRequest, SamplingParams
from tests.engines.graphs import partly_idle, random_sample, with_rollout_logprobs

UPDATING = UpdateOptions(learning_rate=0.01, minibatch_graphs=2, warmup_steps=3, seed=5)
IMITATION = ImitationOptions(learning_rate=0.01, total_steps=10, warmup_steps=2)
SAMPLES = [random_sample(seed, 6 + seed) for seed in range(5)]
DEMONSTRATIONS = [
    Demonstration(
        id=f"d{i}",
        messages=({"role": "user", "content": "who mentored karo venn?"},),
        pieces=(
            Piece("<search> karo venn </search>", trained=True),
            Piece(f" born in {1921 + i}\n", trained=False),
            Piece("<answer> orla </answer>", trained=True),
        ),
    )
    for i in range(3)
]


def make_engine(model, tokenizer, updating=UPDATING, **options):
    return LocalEngine(model, tokenizer, OptimizerOptions(**options), updating, IMITATION)


def weights_of(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


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


def test_imitation_trains_the_trained_pieces_and_the_end(make_model, tokenizer):
    model = make_model()
    pieces = [tokenizer.encode(piece.text) for piece in DEMONSTRATIONS[0].pieces]
    prompt = tokenizer.render(DEMONSTRATIONS[0].messages)
    row = [*prompt, *pieces[0], *pieces[1], *pieces[2], tokenizer.eos_id]
    with torch.no_grad():
        logprobs = model(torch.tensor([row], device=model.device)).logits[0, :-1].log_softmax(-1)
    nll = -logprobs[torch.arange(len(row) - 1), torch.tensor(row[1:])]
    start = len(prompt) - 1
    trained = [
        *range(len(pieces[0])),
        *range(len(pieces[0]) + len(pieces[1]), len(row) - 1 - start),
    ]
    expected = nll[[start + i for i in trained]].mean().item()
    engine = make_engine(model, tokenizer)
    metrics = engine.imitate(DEMONSTRATIONS[:1])
    assert metrics["imitate/loss"] == pytest.approx(expected, abs=1e-6)
    losses = [engine.imitate(DEMONSTRATIONS)["imitate/loss"] for _ in range(12)]
    assert losses[-1] < 0.5 * losses[0]


def test_the_imitation_rate_rises_and_falls_linearly():
    rates = [ImitationOptions(1.0, total_steps=6, warmup_steps=2).rate(i) for i in range(8)]
    np.testing.assert_allclose(rates, [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pieces": (Piece("seen", trained=False),)}, "d0: no trained piece"),
        ({"pieces": (Piece("x " * 200, trained=True),)}, "d0: .* context holds 128"),
    ],
)
def test_a_useless_demonstration_is_one_line(make_model, tokenizer, change, message):
    engine = make_engine(make_model(), tokenizer)
    with pytest.raises(DataError, match=message):
        engine.imitate([replace(DEMONSTRATIONS[0], **change)])


def test_every_trained_token_of_a_batch_of_demonstrations_weighs_the_same(make_model, tokenizer):
    long = replace(DEMONSTRATIONS[0], pieces=(*DEMONSTRATIONS[0].pieces, Piece("x" * 30, True)))
    still = replace(IMITATION, learning_rate=0.0)
    engine = LocalEngine(make_model().train(), tokenizer, OptimizerOptions(), imitation=still)
    assert not engine.model.training
    samples = [demonstration_sample(d, tokenizer, 128) for d in (DEMONSTRATIONS[1], long)]
    losses = [engine.imitate([d])["imitate/loss"] for d in (DEMONSTRATIONS[1], long)]
    together = engine.imitate([DEMONSTRATIONS[1], long])["imitate/loss"]
    expected = np.average(losses, weights=[sample.loss_mask.sum() for sample in samples])
    assert together == pytest.approx(expected, rel=1e-9)


def test_a_demonstration_whose_prompt_has_no_tokens_is_one_line(make_model, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer.hf, "chat_template", None)
    empty = replace(DEMONSTRATIONS[0], messages=({"role": "user", "content": ""},))
    with pytest.raises(DataError, match="d0: the tokenizer makes no tokens of its prompt"):
        make_engine(make_model(), tokenizer).imitate([DEMONSTRATIONS[1], empty])


def run_steps(engine, steps):
    """Imitate, sample and update; returns everything that was drawn and measured."""
    log = []
    for step in steps:
        log.append(engine.imitate(DEMONSTRATIONS))
        context = engine.policy.open([5, 9, 30])
        requests = [SampleRequest(context, 10 * step + i, 6) for i in range(5)]
        log += [
            (c.token_ids, c.logprobs) for c in complete(engine.policy, requests, SamplingParams())
        ]
        log.append(engine.update(SAMPLES, step))
    return log


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_resumed_run_is_bit_identical(make_model, tokenizer, tmp_path, dtype):
    updating = replace(UPDATING, epochs=2, objective=Objective(kl=0.1, entropy=0.01))

    def fresh():
        model = make_model().to(dtype)
        return model, make_engine(model, tokenizer, updating, weight_decay=0.01)

    straight, engine = fresh()
    expected = run_steps(engine, range(4))
    _, first = fresh()
    log = run_steps(first, range(2))
    first.save_checkpoint(tmp_path / "step")
    resumed, second = fresh()
    second.load_checkpoint(tmp_path / "step")
    log += run_steps(second, range(2, 4))
    assert log == expected
    for name, value in straight.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


def test_a_resumed_run_takes_the_settings_that_it_is_given(make_model, tokenizer, tmp_path):
    first = make_engine(make_model(), tokenizer, weight_decay=0.0)
    first.update(SAMPLES, 0)
    first.save_checkpoint(tmp_path / "step")

    def changes(**options):
        model = make_model()
        engine = make_engine(model, tokenizer, replace(UPDATING, minibatch_graphs=5), **options)
        engine.load_checkpoint(tmp_path / "step")
        before = weights_of(model)
        engine.update(SAMPLES, 1)
        return before, {name: after - before[name] for name, after in model.state_dict().items()}

    rate = UPDATING.learning_rate
    before, plain = changes(weight_decay=0.0)
    _, shrunk = changes(weight_decay=3.0)
    _, forgetful = changes(betas=(0.0, 0.0))
    for name, weight in before.items():
        decay = -3.0 * rate * weight if weight.ndim >= 2 else torch.zeros_like(weight)
        assert torch.allclose(shrunk[name] - plain[name], decay, rtol=0.0, atol=1e-12), name
    steps = torch.cat([change.abs().flatten() for change in forgetful.values()])
    steps = steps[steps > 0]  # without a memory each is as long as the rate, whatever its gradient
    assert (steps / rate).quantile(0.1) > 0.99 and steps.max() < 1.01 * rate


@pytest.mark.parametrize("save", [LocalEngine.save_checkpoint, LocalEngine.save_model])
def test_what_is_saved_while_the_policy_samples_has_the_precision_of_the_weights(
    make_model, tokenizer, tmp_path, save
):
    model = make_model().float()
    compute = ComputeOptions(autocast=True)
    engine = LocalEngine(model, tokenizer, OptimizerOptions(), UPDATING, compute=compute)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    context = engine.policy.open([5, 6, 7])
    ticket = engine.policy.submit(SampleRequest(context, 0, 4), SamplingParams())
    assert engine.policy.advance() == []
    save(engine, tmp_path / "step")
    saved = load_model(str(tmp_path / "step"), device=model.device.type).state_dict()
    assert all(torch.equal(saved[name], value) for name, value in before.items())
    ended = {}
    while not ended:
        ended.update(engine.policy.advance())
    assert len(ended[ticket].token_ids) <= 4


def test_a_policy_that_diverged_leaves_nothing_to_one_that_is_loaded(
    make_model, tokenizer, tmp_path
):
    """Under autocast, where rows lie on shelves, and columns without a token are hidden only."""
    model, compute = make_model().float(), ComputeOptions(autocast=True)
    engine = LocalEngine(model, tokenizer, OptimizerOptions(), UPDATING, compute=compute)
    engine.save_checkpoint(tmp_path / "step")
    policy = engine.policy

    def drawn():
        short = SampleRequest(policy.open([5, 6, 7]), 0, 20)
        first = policy.submit(short, SamplingParams())
        ended = dict(policy.advance())
        long = SampleRequest(policy.open(list(range(10, 50))), 1, 20)
        second = policy.submit(long, SamplingParams())
        while len(ended) < 2:
            ended.update(policy.advance())
        policy.release()
        return ended[first].token_ids, ended[second].token_ids

    expected = drawn()
    with torch.no_grad():
        model.get_input_embeddings().weight.fill_(float("nan"))
    with pytest.raises(ModelError, match="not finite"):
        complete(policy, [SampleRequest(policy.open(list(range(10, 40))), 0, 20)], SamplingParams())
    engine.load_checkpoint(tmp_path / "step")
    assert drawn() == expected


def test_a_checkpoint_is_a_hugging_face_directory(make_model, tokenizer, tmp_path):
    model = make_model()
    engine = make_engine(model, tokenizer)
    engine.save_checkpoint(tmp_path / "step")
    engine.update(SAMPLES, 0)
    engine.save_checkpoint(tmp_path / "step")
    loaded = load_model(str(tmp_path / "step"), torch.float64, model.device.type)
    for name, value in model.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[name])
    assert HfTokenizer.load(str(tmp_path / "step")).encode("karo") == tokenizer.encode("karo")
    assert [path.name for path in tmp_path.iterdir()] == ["step"]
    assert "graphpo" not in json.dumps(json.loads((tmp_path / "step/config.json").read_text()))


def test_a_saved_model_has_no_optimiser_state(make_model, tokenizer, tmp_path):
    model = make_model()
    make_engine(model, tokenizer).save_model(tmp_path / "new/model")
    loaded = load_model(str(tmp_path / "new/model"), torch.float64, model.device.type)
    assert torch.equal(loaded.state_dict()["lm_head.weight"], model.state_dict()["lm_head.weight"])
    assert not (tmp_path / "new/model/optimizer.pt").exists()


def test_a_checkpoint_that_cannot_be_written_leaves_the_old_one(
    make_model, tokenizer, tmp_path, monkeypatch
):
    engine = make_engine(make_model(), tokenizer)
    engine.save_checkpoint(tmp_path / "step")
    before = sorted(path.name for path in (tmp_path / "step").iterdir())

    def full(*_args, **_kwargs):
        tokenizer.hf.backend_tokenizer.save("/dev/full")

    monkeypatch.setattr(tokenizer.hf, "save_pretrained", full)
    with pytest.raises(RunError, match="No space left") as caught:
        engine.save_checkpoint(tmp_path / "step")
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["step"]
    assert sorted(path.name for path in (tmp_path / "step").iterdir()) == before


@pytest.mark.parametrize("failing", [1, 2])
def test_a_checkpoint_that_cannot_take_its_place_leaves_the_old_one(
    make_model, tokenizer, tmp_path, rename_fails, failing
):
    engine = make_engine(make_model(), tokenizer)
    engine.save_checkpoint(tmp_path / "step")
    before = {path.name: path.read_bytes() for path in (tmp_path / "step").iterdir()}
    engine.update(SAMPLES, 0)
    rename_fails(failing)
    with pytest.raises(RunError, match="No space left"):
        engine.save_checkpoint(tmp_path / "step")
    assert [path.name for path in tmp_path.iterdir()] == ["step"]
    assert {path.name: path.read_bytes() for path in (tmp_path / "step").iterdir()} == before


def test_a_saved_model_replaces_the_one_there_and_nothing_beside_it(
    make_model, tokenizer, tmp_path
):
    """A copy that the user keeps stays, a link stays one, and what a kill has left goes."""
    link, target, kept = (tmp_path / name for name in ("link", "disk/policy", "disk/policy.old"))
    for directory in (
        target,
        kept,
        *(tmp_path / f"disk/.policy.{end}" for end in ("old", "partial")),
    ):
        directory.mkdir(parents=True)
        (directory / "weights").write_text("half")
    (kept / "mine").write_text("mine")
    link.symlink_to(target)
    make_engine(make_model(), tokenizer).save_model(link)
    assert link.is_symlink() and (target / "config.json").is_file()
    assert {path.name for path in (tmp_path / "disk").iterdir()} == {"policy", "policy.old"}
    assert (kept / "mine").read_text() == "mine"


@pytest.mark.parametrize(
    "state",
    [
        {"state": {}, "param_groups": []},
        {"optimizer": {"state": {}, "param_groups": []}},
        {"optimizer": {"state": {}}, "counters": {"update_steps": 0, "imitation_steps": 0}},
        {"optimizer": {"state": {}, "param_groups": []}, "counters": {"update_steps": 0}},
        {"optimizer": 3, "counters": 4},
        [1, 2],
        None,
    ],
)
def test_an_optimiser_state_of_another_kind_is_one_line(make_model, tokenizer, tmp_path, state):
    engine = make_engine(make_model(), tokenizer)
    engine.save_checkpoint(tmp_path / "step")
    torch.save(state, tmp_path / "step/optimizer.pt")
    with pytest.raises(RunError, match=r"optimizer\.pt is damaged: .*; delete") as caught:
        engine.load_checkpoint(tmp_path / "step")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("groups", [[], [{}, {}], [1, 2]])
def test_an_optimiser_state_of_other_weights_is_one_line(make_model, tokenizer, tmp_path, groups):
    engine = make_engine(make_model(), tokenizer)
    engine.save_checkpoint(tmp_path / "step")
    counters = {"update_steps": 0, "imitation_steps": 0}
    state = {"optimizer": {"state": {}, "param_groups": groups}, "counters": counters}
    torch.save(state, tmp_path / "step/optimizer.pt")
    with pytest.raises(RunError, match="belongs to another model") as caught:
        engine.load_checkpoint(tmp_path / "step")
    assert "\n" not in str(caught.value)


def test_loading_what_is_no_checkpoint_is_one_line(make_model, tokenizer, tmp_path):
    engine = make_engine(make_model(), tokenizer)
    engine.save_checkpoint(tmp_path / "step")
    with pytest.raises(RunError, match=r"optimizer\.pt is missing"):
        engine.load_checkpoint(tmp_path / "nothing")
    bare = shutil.copytree(tmp_path / "step", tmp_path / "bare")
    (bare / "model.safetensors").unlink()
    with pytest.raises(RunError, match=r"cannot be loaded.*, or delete that checkpoint$"):
        engine.load_checkpoint(bare)
    other = make_engine(make_model("llama"), tokenizer)
    with pytest.raises(RunError, match=r"another model: Error.*(size mismatch|key)"):
        other.load_checkpoint(tmp_path / "step")


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
