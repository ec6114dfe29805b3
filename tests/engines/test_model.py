import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from graphpo_agent.engines.local.model import check_vocabulary, context_limit, load_model
from graphpo_agent.errors import ModelError


@pytest.fixture
def model_dir(make_model, tmp_path):
    make_model().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_saved_model_loads_in_the_asked_precision(model_dir, make_model):
    model = load_model(str(model_dir), torch.float64)
    assert model.dtype == torch.float64
    assert not model.training
    for name, weight in make_model().state_dict().items():
        assert torch.equal(weight, model.state_dict()[name])


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_a_missing_file_is_one_line(model_dir, file):
    (model_dir / file).unlink()
    with pytest.raises(ModelError, match=file.split(".")[0]) as caught:
        load_model(str(model_dir))
    assert "\n" not in str(caught.value)


def test_a_damaged_weight_file_is_one_line(model_dir):
    (model_dir / "model.safetensors").write_bytes(b"not a weight file")
    with pytest.raises(ModelError, match="cannot be loaded") as caught:
        load_model(str(model_dir))
    assert "\n" not in str(caught.value)


def test_missing_weights_are_refused_and_not_made_up(model_dir):
    weights = load_file(model_dir / "model.safetensors")
    removed = weights.pop("model.layers.1.mlp.up_proj.weight")
    assert removed.numel()
    save_file(weights, model_dir / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"1 weights are missing.*layers\.1\.mlp\.up_proj"):
        load_model(str(model_dir))


def test_a_missing_directory_is_one_line(tmp_path):
    with pytest.raises(ModelError, match="does not exist"):
        load_model(str(tmp_path / "nothing"))


def test_a_tokenizer_larger_than_the_model_is_refused(make_model, tokenizer, tmp_path):
    model = make_model()
    check_vocabulary(model, tokenizer)
    model.resize_token_embeddings(tokenizer.vocab_size - 1)
    with pytest.raises(ModelError, match=f"has {tokenizer.vocab_size} tokens"):
        check_vocabulary(model, tokenizer)


def test_a_sliding_window_bounds_the_context(make_model):
    config = make_model(limit=100).config
    assert context_limit(config) == 100
    config.sliding_window = 64
    assert context_limit(config) == 64


def test_layers_that_are_not_attention_are_refused(make_model):
    config = make_model().config
    config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(ModelError, match="linear_attention"):
        context_limit(config)


def test_a_local_directory_never_reaches_for_the_network(model_dir, tokenizer_dir, monkeypatch):
    def refuse(*_args, **_kwargs):
        raise AssertionError("network access")

    monkeypatch.setattr("socket.socket.connect", refuse)
    shutil.copytree(tokenizer_dir, model_dir, dirs_exist_ok=True)
    (model_dir / "generation_config.json").unlink(missing_ok=True)
    from graphpo_agent.engines.tokenizer import HfTokenizer

    load_model(str(model_dir))
    assert HfTokenizer.load(str(model_dir)).eos_ids == {2}
