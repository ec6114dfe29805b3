"""What the local engine saves and loads."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from graphpo_agent.engines.local.engine import LocalEngine
from graphpo_agent.engines.local.loss import Objective
from graphpo_agent.engines.local.model import load_model
from graphpo_agent.engines.local.options import ComputeOptions, OptimizerOptions
from graphpo_agent.engines.tokenizer import HfTokenizer
from graphpo_agent.errors import ModelError, RunError
from graphpo_agent.rollout.scheduler import complete
from graphpo_agent.types import SampleRequest, SamplingParams
from tests.engines.learners import DEMONSTRATIONS, SAMPLES, UPDATING, make_engine, weights_of


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
