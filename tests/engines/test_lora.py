"""Adapters: only they are trained, in the model that samples; what is saved loads everywhere."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen3MoeConfig
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from graphpo_agent.engines.local import lora
from graphpo_agent.engines.local.engine import LocalEngine
from graphpo_agent.engines.local.lora import LoraOptions, adapters_off, add_adapters, merged_weights
from graphpo_agent.engines.local.loss import Objective
from graphpo_agent.engines.local.model import load_model
from graphpo_agent.engines.local.options import ComputeOptions, OptimizerOptions, UpdateOptions
from graphpo_agent.errors import ConfigError, RunError
from tests.engines.graphs import random_sample, with_rollout_logprobs
from tests.engines.norms import norm_in_full_precision
from tests.engines.test_gradient import per_edge_loss
from tests.engines.tiny import LINEAR, SIZES

OPTIONS = LoraOptions(rank=3, alpha=6.0)
UPDATING = UpdateOptions(
    learning_rate=0.01, minibatch_graphs=2, epochs=2, objective=Objective(kl=0.1), seed=5
)
SAMPLES = [random_sample(seed, 6 + seed) for seed in range(4)]
IDS = [[5, 9, 30, 7, 8]]


def adapted(make_model, family="qwen2", options=OPTIONS, noise=0.1):
    """A model whose adapters have an effect; the same one for the same arguments."""
    model = make_model(family)
    torch.manual_seed(0)
    add_adapters(model, options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter += noise * torch.randn_like(parameter)
    return model


def logits(model):
    with torch.no_grad():
        return model(torch.tensor(IDS, device=model.device), use_cache=False).logits


def trained_names(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_new_adapters_change_nothing_and_are_all_that_is_trained(make_model, family):
    plain = make_model(family)
    model = adapted(make_model, family, noise=0.0)
    assert torch.equal(logits(plain), logits(model))
    names = trained_names(model)
    assert names and all(".lora_" in name for name in names)
    assert len(names) == 2 * 7 * model.config.num_hidden_layers
    only = adapted(make_model, family, LoraOptions(2, 4.0, ("q_proj",)))
    assert all(".q_proj.lora_" in name for name in trained_names(only))


@pytest.mark.parametrize(
    ("family", "rounding"), [("qwen2", 1e-12), *((family, 1e-11) for family in LINEAR)]
)
@pytest.mark.parametrize("compute", [ComputeOptions(), ComputeOptions(checkpoint_layers=True)])
def test_gradient_and_reference_equal_one_row_per_edge(
    make_model, tokenizer, monkeypatch, compute, family, rounding
):
    monkeypatch.setattr(Qwen2RMSNorm, "forward", norm_in_full_precision)
    objective = Objective(kl=0.5)
    model, oracle = adapted(make_model, family), adapted(make_model, family)
    samples = [with_rollout_logprobs(model, sample, 0.3) for sample in SAMPLES]
    reference = make_model(family)
    loss, clips = per_edge_loss(oracle, samples, objective, "edge_mean", reference=reference)
    loss.backward()
    assert clips > 0
    engine = LocalEngine(
        model,
        tokenizer,
        OptimizerOptions(max_grad_norm=float("inf"), max_tokens=40),
        UpdateOptions(old_logprobs="rollout", objective=objective),
        compute=compute,
    )
    caught = {}

    def catch(*_):
        caught.update({n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad})

    engine._optimizer.register_step_pre_hook(catch)
    metrics = engine.update(samples, 0)
    assert metrics["update/loss"] == pytest.approx(loss.item(), abs=1e-8)
    expected = {n: p.grad for n, p in oracle.named_parameters() if p.requires_grad}
    assert caught.keys() == expected.keys()
    assert max(float(g.abs().max()) for g in expected.values()) > 1e-3
    for name, gradient in expected.items():
        torch.testing.assert_close(caught[name], gradient, rtol=0, atol=rounding)


def test_the_weights_under_the_adapters_stay(make_model, tokenizer):
    model = adapted(make_model, noise=0.0)
    before = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    engine = LocalEngine(model, tokenizer, OptimizerOptions(), UPDATING)
    assert engine._reference is None
    assert engine.update(SAMPLES, 0)["update/reference_kl"] > 0
    for name, value in before.items():
        assert torch.equal(value, model.get_parameter(name))
    assert not torch.equal(logits(model), logits(make_model()))
    names = trained_names(model)
    with adapters_off(model):
        assert torch.equal(logits(model), logits(make_model()))
    assert trained_names(model) == names


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_the_saved_model_is_plain_and_has_the_adapters_in_it(
    make_model, tokenizer, tmp_path, family
):
    model = adapted(make_model, family)
    model.generation_config.eos_token_id = [1, 7]  # as of models with several ends
    expected = logits(model)
    LocalEngine(model, tokenizer, OptimizerOptions(), UPDATING).save_model(tmp_path / "model")
    loaded = load_model(str(tmp_path / "model"), torch.float64, model.device.type)
    assert loaded.generation_config.eos_token_id == [1, 7]
    torch.testing.assert_close(logits(loaded), expected, rtol=0, atol=1e-9)
    assert not any("lora" in name for name in loaded.state_dict())
    assert not (tmp_path / "model/adapter_config.json").exists()
    assert loaded.config.to_dict().keys() == make_model(family).config.to_dict().keys()
    assert torch.equal(logits(model), expected), "merging must not touch the trained model"
    for name, value in merged_weights(model):
        assert torch.equal(value, loaded.state_dict()[name])


EXPERTS = {
    "qwen3_moe": Qwen3MoeConfig(moe_intermediate_size=24, num_experts=4, mlp_only_layers=[0]),
    "mixtral": MixtralConfig(num_local_experts=3, sliding_window=None),
}


def experts(kind, vocab_size):
    config = EXPERTS[kind]
    config.update(
        SIZES
        | {
            "vocab_size": vocab_size,
            "num_experts_per_tok": 2,
            "max_position_embeddings": 128,
            "initializer_range": 0.3,
        }
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("qwen3_moe", None),
        ("qwen3_moe", ("q_proj", "down_proj")),
        ("qwen3_moe", ("gate_proj", "up_proj")),
        ("mixtral", ("gate",)),
        ("mixtral", None),
    ],
)
def test_adapters_of_experts_and_routers_are_in_the_saved_model(
    tokenizer, tmp_path, kind, names, device
):
    def make(_family):
        return experts(kind, tokenizer.vocab_size).to(device)

    model = adapted(make, options=LoraOptions(3, 6.0, names), noise=0.3)
    expected = logits(model)
    engine = LocalEngine(model, tokenizer, OptimizerOptions(), UPDATING)
    engine.save_model(tmp_path / "model")
    loaded = load_model(str(tmp_path / "model"), device=model.device.type)
    torch.testing.assert_close(logits(loaded), expected, rtol=0, atol=1e-4)
    assert (logits(make(kind)) - expected).abs().max() > 0.05


def test_adapters_that_a_model_cannot_run_with_are_one_line(make_model, monkeypatch):
    model = make_model()
    fitting = type(model).forward

    def looks_into_its_layer(self, *args, **kwargs):
        self.model.layers[0].self_attn.q_proj.no_such_thing()
        return fitting(self, *args, **kwargs)

    monkeypatch.setattr(type(model), "forward", looks_into_its_layer)
    with pytest.raises(ConfigError, match=r"no_such_thing.*model\.lora\.target_modules") as caught:
        add_adapters(model, OPTIONS)
    assert "\n" not in str(caught.value)


def test_a_resumed_run_is_bit_identical(make_model, tokenizer, tmp_path):
    def fresh():
        model = adapted(make_model)
        return model, LocalEngine(model, tokenizer, OptimizerOptions(), UPDATING)

    straight, engine = fresh()
    expected = [engine.update(SAMPLES, step) for step in range(4)]
    _, first = fresh()
    log = [first.update(SAMPLES, step) for step in range(2)]
    first.save_checkpoint(tmp_path / "step")
    resumed, second = fresh()
    second.load_checkpoint(tmp_path / "step")
    log += [second.update(SAMPLES, step) for step in range(2, 4)]
    assert log == expected
    for name, value in straight.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


def test_too_old_a_peft_for_transformers_is_one_line(make_model, monkeypatch):
    monkeypatch.setattr(lora, "MIN_PEFT_VERSION", "99.0")
    with pytest.raises(ConfigError, match=r"needs peft 99\.0 or newer, and \d.* is installed; run"):
        adapted(make_model, "qwen2")


def test_a_checkpoint_is_a_peft_directory_that_names_its_base(
    make_model, tokenizer, tmp_path, monkeypatch
):
    make_model().save_pretrained(tmp_path / "base")
    with monkeypatch.context() as there:
        there.chdir(tmp_path)
        model = adapted(lambda _family: load_model("base", torch.float64))
    engine = LocalEngine(model, tokenizer, OptimizerOptions(), UPDATING)
    engine.save_checkpoint(tmp_path / "step")
    assert not (tmp_path / "step/model.safetensors").exists()
    config = json.loads((tmp_path / "step/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "base")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "step", dtype=torch.float64).eval()
    torch.testing.assert_close(logits(loaded), logits(model), rtol=0, atol=1e-6)


def test_a_checkpoint_of_other_adapters_is_one_line(make_model, tokenizer, tmp_path):
    engine = LocalEngine(adapted(make_model), tokenizer, OptimizerOptions(), UPDATING)
    engine.save_checkpoint(tmp_path / "step")
    plain = LocalEngine(make_model(), tokenizer, OptimizerOptions(), UPDATING)
    plain.save_checkpoint(tmp_path / "plain")
    with pytest.raises(RunError, match=r"adapter_model\.safetensors is missing"):
        engine.load_checkpoint(tmp_path / "plain")
    for options in (replace(OPTIONS, rank=2), replace(OPTIONS, target_modules=("q_proj",))):
        other = adapted(make_model, options=options)
        with pytest.raises(RunError, match="another model") as caught:
            LocalEngine(other, tokenizer, OptimizerOptions(), UPDATING).load_checkpoint(
                tmp_path / "step"
            )
        assert "\n" not in str(caught.value)


def test_adapters_on_bfloat16_weights_learn_in_float32(make_model, tokenizer, tmp_path):
    model = make_model(spread=0.02).bfloat16()
    add_adapters(model, OPTIONS)
    frozen = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    adapters = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    assert {value.dtype for value in frozen.values()} == {torch.bfloat16}
    assert {value.dtype for value in adapters.values()} == {torch.float32}
    rate = 1e-6  # of a weight of 0.1, half a step of bfloat16 is 2e-4
    updating = replace(UPDATING, learning_rate=rate, objective=Objective())
    engine = LocalEngine(model, tokenizer, OptimizerOptions(), updating)
    for step in range(2):
        engine.update(SAMPLES, step)
    # Nor are log-probabilities rounded: where nothing is learned, every ratio is 1.
    resting = LocalEngine(model, tokenizer, OptimizerOptions(), replace(updating, learning_rate=0))
    assert resting.update(SAMPLES, 0)["update/kl"] < 1e-6
    for name, value in frozen.items():
        assert torch.equal(model.get_parameter(name), value)
    for name, value in adapters.items():
        assert 0 < (model.get_parameter(name) - value).abs().max() < 20 * rate
    engine.save_model(tmp_path / "model")
    saved = load_model(str(tmp_path / "model"), torch.bfloat16, model.device.type).state_dict()
    merged = dict(merged_weights(model))
    assert {value.dtype for value in merged.values()} == {torch.bfloat16}
    assert all(torch.equal(saved[name], value) for name, value in merged.items())


@pytest.mark.parametrize(
    ("family", "target"),
    [
        ("qwen2", "embed_tokens"),
        ("qwen2", "model.embed_tokens"),
        ("qwen2", "lm_head"),
        ("llama", "lm_head"),
    ],
)
def test_the_output_head_is_not_adapted(make_model, family, target):
    model = make_model(family)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == (family == "qwen2")
    with pytest.raises(ConfigError, match=f"{target} .* output head") as caught:
        add_adapters(model, LoraOptions(2, 4.0, ("q_proj", target)))
    assert "\n" not in str(caught.value)
    assert trained_names(model) == {name for name, _ in model.named_parameters()}


def test_an_embedding_of_its_own_is_adapted(make_model, tokenizer, tmp_path):
    model = adapted(make_model, "llama", LoraOptions(2, 4.0, ("embed_tokens", "q_proj")))
    LocalEngine(model, tokenizer, OptimizerOptions(), UPDATING).save_model(tmp_path / "model")
    loaded = load_model(str(tmp_path / "model"), torch.float64, model.device.type)
    torch.testing.assert_close(logits(loaded), logits(model), rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (("query",), "no layer query; it has down_proj, .*v_proj$"),
        (("q_proj", "nonsense", "mlp.up", "proj"), "no layer nonsense and no mlp.up and no proj;"),
    ],
)
def test_every_layer_that_does_not_exist_is_refused(make_model, names, says):
    model = make_model()
    with pytest.raises(ConfigError, match=rf"^model\.lora\.target_modules: .*{says}") as caught:
        add_adapters(model, LoraOptions(2, 4.0, names))
    assert "\n" not in str(caught.value) and "lm_head" not in str(caught.value)
    assert trained_names(model) == {name for name, _ in model.named_parameters()}


def test_layers_are_found_by_the_end_of_their_path(make_model):
    model = adapted(make_model, options=LoraOptions(2, 4.0, ("self_attn.q_proj", "1.mlp.up_proj")))
    layers = {name.partition(".lora_")[0] for name in trained_names(model)}
    assert layers == {
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.mlp.up_proj",
    }
