import json
import shutil
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from graphpo_agent.engines.local.engine import LocalEngine
from graphpo_agent.engines.local.forward import check_flat_layout
from graphpo_agent.engines.local.model import (
    check_vocabulary,
    computable,
    load_model,
    model_config,
    model_without_weights,
    usable_device,
)
from graphpo_agent.engines.local.options import ComputeOptions, OptimizerOptions
from graphpo_agent.engines.local.sampler import LocalPolicy
from graphpo_agent.errors import ModelError
from tests.engines.tiny import tiny_model


@pytest.fixture
def model_dir(make_model, tmp_path):
    make_model().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_generation_config_without_do_sample_can_be_saved_again(model_dir, tmp_path):
    (model_dir / "generation_config.json").write_text('{"temperature": 0.6, "top_p": 0.9}')
    model = load_model(str(model_dir))
    model.save_pretrained(tmp_path / "again")
    kept = json.loads((tmp_path / "again/generation_config.json").read_text())
    assert (kept["temperature"], kept["top_p"], kept["do_sample"]) == (0.6, 0.9, True)


def test_a_generation_config_that_contradicts_itself_is_one_line(model_dir):
    written = {"early_stopping": True, "num_beams": 1}
    (model_dir / "generation_config.json").write_text(json.dumps(written))
    with pytest.raises(ModelError, match=r"generation_config\.json contradicts itself") as caught:
        load_model(str(model_dir))
    assert "\n" not in str(caught.value)


def test_a_saved_model_loads_in_the_asked_precision(model_dir, make_model):
    model = load_model(str(model_dir), torch.float64)
    assert model.dtype == torch.float64
    assert not model.training
    for name, weight in make_model().state_dict().items():
        assert torch.equal(weight, model.state_dict()[name])


def test_a_configuration_that_asks_for_tuples_changes_nothing(model_dir):
    path = model_dir / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"return_dict": False}))
    check_flat_layout(load_model(str(model_dir)), ComputeOptions())


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_a_missing_file_is_one_line(model_dir, file):
    (model_dir / file).unlink()
    with pytest.raises(ModelError, match=file.split(".")[0]) as caught:
        load_model(str(model_dir))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"hidden_size": -8}, "negative dimension"),
        ({"num_attention_heads": 0}, "zero"),
        (None, "holds no JSON object"),
    ],
)
def test_a_config_that_no_model_can_have_is_one_line(model_dir, change, says):
    path = model_dir / "config.json"
    config = None if change is None else json.loads(path.read_text()) | change
    path.write_text(json.dumps(config))
    for load in (load_model, lambda name: model_without_weights(name, torch.float32)):
        with pytest.raises(ModelError, match=says) as caught:
            load(str(model_dir))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", ["nope", [], "load"])
def test_an_unknown_dtype_in_the_config_is_one_line(model_dir, dtype):
    path = model_dir / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"dtype": dtype}))
    with pytest.raises(ModelError, match=r"model .* cannot be read: config.json is damaged") as one:
        model_without_weights(str(model_dir), torch.float32)
    assert "\n" not in str(one.value)
    assert load_model(str(model_dir)).dtype == torch.float32  # the asked one, whatever it says


def test_a_name_that_is_neither_on_the_hub_nor_a_directory_is_told_as_both():
    for load in (load_model, model_config):
        with pytest.raises(ModelError, match=r"model no/model .*; no such directory is here$"):
            load("no/model")


@pytest.mark.parametrize("device", ["meta", "toaster", ""])
def test_a_device_that_cannot_compute_is_one_line(device):
    with pytest.raises(ModelError, match=f"device '{device}' cannot be used") as caught:
        usable_device(device)
    assert "\n" not in str(caught.value)


def test_a_damaged_weight_file_is_one_line(model_dir):
    (model_dir / "model.safetensors").write_bytes(b"not a weight file")
    with pytest.raises(ModelError, match=r"cannot be loaded.* a weight file is damaged") as caught:
        load_model(str(model_dir))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"junk", b"G123", b"\x80", b"\x80\x02t."], ids=repr)
def test_junk_as_pickled_weights_is_one_line(model_dir, content):
    (model_dir / "model.safetensors").unlink()
    (model_dir / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(ModelError, match=r"cannot be loaded.* a weight file is damaged") as caught:
        load_model(str(model_dir))
    assert "\n" not in str(caught.value) and "weights_only" not in str(caught.value)


@pytest.mark.parametrize("index", ["null", "[]", '{"weight_map": 5}'])
def test_a_damaged_list_of_weight_files_is_one_line(model_dir, index):
    (model_dir / "model.safetensors").unlink()
    (model_dir / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match=r"cannot be loaded.* a weight file is damaged") as caught:
        load_model(str(model_dir))
    assert "\n" not in str(caught.value)


def test_missing_weights_are_refused_and_not_made_up(model_dir):
    weights = load_file(model_dir / "model.safetensors")
    removed = weights.pop("model.layers.1.mlp.up_proj.weight")
    assert removed.numel()
    save_file(weights, model_dir / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"1 weights are missing.*layers\.1\.mlp\.up_proj"):
        load_model(str(model_dir))


def test_weights_of_other_sizes_are_named(model_dir):
    path = model_dir / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"intermediate_size": 2 * config["intermediate_size"]}))
    with pytest.raises(ModelError, match=r"config\.json gives, first model\.layers\.0\.mlp") as one:
        load_model(str(model_dir))
    hidden, width = config["hidden_size"], config["intermediate_size"]
    assert f"[{hidden}, {width}] instead of [{hidden}, {2 * width}]" in str(one.value)
    assert "\n" not in str(one.value)


def test_weights_without_a_place_are_told(model_dir):
    path = model_dir / "config.json"
    config = json.loads(path.read_text())
    layers = config["num_hidden_layers"] - 1
    config |= {"num_hidden_layers": layers, "layer_types": config["layer_types"][:layers]}
    path.write_text(json.dumps(config))
    with pytest.warns(UserWarning, match=rf"left out, first model\.layers\.{layers}\."):
        assert load_model(str(model_dir)).config.num_hidden_layers == layers


def test_weights_that_are_no_numbers_are_not_blamed_on_the_family(make_model, tokenizer):
    model = make_model()
    model.model.norm.weight.data.fill_(torch.nan)
    with pytest.raises(ModelError, match="logits are no numbers; give sound weights"):
        LocalEngine(model, tokenizer, OptimizerOptions())


def test_a_missing_directory_is_one_line(tmp_path):
    with pytest.raises(ModelError, match="does not exist"):
        load_model(str(tmp_path / "nothing"))


def test_a_tokenizer_larger_than_the_model_is_refused(make_model, tokenizer, tmp_path):
    model = make_model()
    check_vocabulary(model, tokenizer)
    model.resize_token_embeddings(tokenizer.vocab_size - 1)
    with pytest.raises(ModelError, match=f"has {tokenizer.vocab_size} tokens"):
        check_vocabulary(model, tokenizer)


def test_a_window_that_layers_do_not_tell_their_attention_is_refused(make_model):
    model = make_model("llama", limit=100)
    check_flat_layout(model, ComputeOptions())
    model.config.sliding_window = 100
    check_flat_layout(model, ComputeOptions())
    model.config.sliding_window = 99
    with pytest.raises(ModelError, match="do not tell their attention of the sliding_window"):
        check_flat_layout(model, ComputeOptions())


def test_a_local_directory_never_reaches_for_the_network(model_dir, tokenizer_dir, monkeypatch):
    def refuse(*_args, **_kwargs):
        raise AssertionError("network access")

    monkeypatch.setattr("socket.socket.connect", refuse)
    shutil.copytree(tokenizer_dir, model_dir, dirs_exist_ok=True)
    (model_dir / "generation_config.json").unlink(missing_ok=True)
    from graphpo_agent.engines.tokenizer import HfTokenizer

    load_model(str(model_dir))
    assert HfTokenizer.load(str(model_dir)).eos_ids == {2}


def experts(tokenizer):
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=32,
        moe_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return Qwen3MoeForCausalLM(config).eval()


@pytest.mark.parametrize("use", [LocalPolicy, partial(LocalEngine, optimizer=OptimizerOptions())])
def test_experts_in_a_precision_they_do_not_know_are_one_line(tokenizer, use):
    for dtype in (torch.float32, torch.bfloat16):
        use(experts(tokenizer).to(dtype), tokenizer)
    says = (
        r"model .*\(Qwen3MoeForCausalLM\) cannot be computed in float64: .* model.dtype to float32"
    )
    with pytest.raises(ModelError, match=says) as caught:
        use(experts(tokenizer).double(), tokenizer)
    assert "\n" not in str(caught.value)


def test_what_fails_in_every_precision_or_for_memory_is_not_blamed_on_it(make_model):
    plain, double = make_model().float(), make_model()
    cases = [(RuntimeError("kernel"), plain), (TypeError("one"), plain), (TypeError("two"), double)]
    for error, model in cases:
        with pytest.raises(ModelError) as caught, computable(model):
            raise error
        assert f"cannot be computed: {error}; use another" in str(caught.value)
    with pytest.raises(torch.OutOfMemoryError, match="full"), computable(make_model()):
        raise torch.OutOfMemoryError("full")


def save_in_mxfp4(place):
    """A tiny gpt-oss as its authors save it: numbers of 4 bits, 32 of them with one exponent."""
    tiny_model("gpt_oss", 300).float().save_pretrained(place)
    weights, packed = load_file(place / "model.safetensors"), {}
    make = torch.Generator().manual_seed(0)
    for name, weight in weights.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, ins, outs = weight.shape
            groups = (experts, outs, ins // 32)
            packed[f"{name}_blocks"] = torch.randint(
                0, 256, (*groups, 16), generator=make, dtype=torch.uint8
            )
            packed[f"{name}_scales"] = torch.full(groups, 127 - 2, dtype=torch.uint8)
        else:
            packed[name] = weight.bfloat16()
    save_file(packed, place / "model.safetensors", {"format": "pt"})
    written = json.loads((place / "config.json").read_text())
    written["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    (place / "config.json").write_text(json.dumps(written))
    return packed


def test_weights_in_mxfp4_are_loaded_in_full_and_saved_so(tmp_path):
    packed = save_in_mxfp4(tmp_path / "packed")
    model = load_model(str(tmp_path / "packed"))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    numbers = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    table = torch.tensor(numbers + [-x for x in numbers]) / 4
    blocks = packed["model.layers.1.mlp.experts.down_proj_blocks"].long()
    pairs = torch.stack([table[blocks & 15], table[blocks >> 4]], -1)
    down = model.model.layers[1].mlp.experts.down_proj
    assert torch.equal(down, pairs.flatten(2).transpose(1, 2))
    check_flat_layout(model, ComputeOptions())
    model.save_pretrained(tmp_path / "full")
    again = load_model(str(tmp_path / "full"))
    assert model.state_dict().keys() == again.state_dict().keys()
    for name, weight in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight)


def test_weights_that_are_quantized_otherwise_are_refused(model_dir):
    written = json.loads((model_dir / "config.json").read_text())
    written["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (model_dir / "config.json").write_text(json.dumps(written))
    with pytest.raises(ModelError, match=r"weights are quantized \(gptq\)"):
        load_model(str(model_dir))
