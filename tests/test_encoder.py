import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoModel,
    AutoTokenizer,
    BertConfig,
    BertModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2Model,
    RobertaConfig,
    T5Config,
)
from transformers.utils import logging as transformers_logging

from graphpo_agent.data.toy_model import make_toy_tokenizer
from graphpo_agent.encoder import EncoderEmbedder
from graphpo_agent.errors import GraphPOError, ModelError

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "query", ":", "karo", "venn", "mentor", "born", "1987"]
TEXTS = ["karo venn", "mentor", "karo venn mentor born 1987", "born", "karo venn born"]


def bert_tokenizer(**limit):
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    words.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", **limit
    )


@pytest.fixture(scope="module", params=["bert", "qwen2"])
def directory(request, tmp_path_factory):
    """A tiny random encoder with its tokenizer; only the BERT one adds [CLS] and [SEP]."""
    path = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 2}
    if request.param == "bert":
        tokenizer = bert_tokenizer(model_max_length=12)
        model = BertModel(BertConfig(vocab_size=len(WORDS), max_position_embeddings=12, **sizes))
    else:
        tokenizer = make_toy_tokenizer(TEXTS)
        model = Qwen2Model(Qwen2Config(vocab_size=len(tokenizer), num_key_value_heads=2, **sizes))
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def alone(directory, text, pooling):
    """One text through the model by itself: no padding, no batch."""
    model = AutoModel.from_pretrained(directory).eval()
    ids = AutoTokenizer.from_pretrained(directory)(text)["input_ids"]
    with torch.no_grad():
        hidden = model(torch.tensor([ids])).last_hidden_state[0]
    return {"mean": hidden.mean(0), "cls": hidden[0], "last": hidden[-1]}[pooling].numpy()


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
@pytest.mark.parametrize("batch_size", [1, 2, 32])
def test_batches_give_what_each_text_gives_alone(directory, pooling, batch_size):
    embedder = EncoderEmbedder(directory, pooling=pooling, normalize=False, batch_size=batch_size)
    expected = np.stack([alone(directory, text, pooling) for text in TEXTS])
    np.testing.assert_allclose(embedder.embed(TEXTS), expected, atol=1e-5)


def test_a_configuration_that_asks_for_tuples_changes_nothing(directory, tmp_path):
    copy = shutil.copytree(directory, tmp_path / "encoder")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"return_dict": False}))
    expected = EncoderEmbedder(directory).embed(TEXTS)
    np.testing.assert_array_equal(EncoderEmbedder(copy).embed(TEXTS), expected)


def test_normalised_rows_have_length_one_and_blank_text_is_zero(directory):
    vectors = EncoderEmbedder(directory).embed(["karo", " ", "venn"])
    assert vectors.dtype == np.float32 and vectors.shape == (3, 16)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), [1, 0, 1], atol=1e-5)
    assert EncoderEmbedder(directory).embed([]).shape == (0, 16)


def test_half_of_a_surrogate_pair_is_a_question_mark(directory):
    half, mark = EncoderEmbedder(directory).embed(["karo \ud83d", "karo ?"])
    np.testing.assert_allclose(half, mark, atol=1e-6)


def test_prefix_is_read_before_every_text(directory):
    plain = EncoderEmbedder(directory).embed(["query : karo"])
    np.testing.assert_allclose(
        EncoderEmbedder(directory, prefix="query : ").embed(["karo"]), plain, atol=1e-6
    )


def test_long_texts_are_cut(directory):
    text = "karo venn " * 50
    embedder = EncoderEmbedder(directory, max_tokens=7)
    np.testing.assert_allclose(embedder.embed([text]), embedder.embed([text + "born"]), atol=1e-6)
    assert np.isfinite(EncoderEmbedder(directory, max_tokens=12).embed([text])).all()


@pytest.mark.parametrize(
    ("config", "limit", "most"),
    [
        (BertConfig(max_position_embeddings=12), {}, 12),
        (RobertaConfig(max_position_embeddings=12), {}, 10),  # two positions are padding's
        (BertConfig(max_position_embeddings=12), {"model_max_length": 8}, 8),
    ],
)
def test_what_tokenizer_or_model_takes_at_most_cuts_texts(config, limit, most, tmp_path):
    config.update({"vocab_size": len(WORDS), "hidden_size": 16, "intermediate_size": 32})
    config.update({"num_hidden_layers": 1, "num_attention_heads": 2})
    AutoModel.from_config(config).save_pretrained(tmp_path)
    bert_tokenizer(**limit).save_pretrained(tmp_path)
    embedder = EncoderEmbedder(tmp_path)
    words = ["karo"] * (most - 3)
    texts = [" ".join([*words, *more]) for more in (["venn"], ["venn", "born"], ["mentor"])]
    kept, cut, other = embedder.embed(texts)
    np.testing.assert_allclose(kept, cut, atol=1e-6)
    assert np.abs(kept - other).max() > 1e-3


def test_no_call_changes_the_tokenizer_that_threads_share(directory):
    encoder = EncoderEmbedder(str(directory), max_tokens=6)
    shared = encoder._tokenizer.backend_tokenizer
    before = shared.to_str()
    assert shared.truncation["max_length"] == 6
    encoder.embed(["karo venn mentor born 1987 karo venn", "", "born"])
    assert shared.to_str() == before


def test_a_pooler_that_was_not_published_is_not_missed(tmp_path, directory):
    shutil.copytree(directory, tmp_path / "encoder")
    weights = load_file(directory / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if "pooler." not in name}
    save_file(kept, tmp_path / "encoder/model.safetensors", {"format": "pt"})
    expected = EncoderEmbedder(directory).embed(TEXTS)
    np.testing.assert_array_equal(EncoderEmbedder(tmp_path / "encoder").embed(TEXTS), expected)


def test_what_transformers_says_elsewhere_stays_as_loud(directory):
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_info()
    EncoderEmbedder(directory)
    assert transformers_logging.get_verbosity() == transformers_logging.INFO
    transformers_logging.set_verbosity(before)


def test_checkpoint_without_some_weights_is_refused_not_filled_at_random(tmp_path, directory):
    for file in directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(directory / "model.safetensors")
    name = next(key for key in weights if "layer" in key)
    save_file(
        {key: weight for key, weight in weights.items() if key != name},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    with pytest.raises(ModelError, match="1 weights are missing"):
        EncoderEmbedder(tmp_path)


@pytest.mark.parametrize("spoil", ["missing", "empty", "no_weights", "bad_weights", "bad_config"])
def test_unusable_model_is_one_clear_line(tmp_path, directory, spoil):
    path = tmp_path / "encoder"
    if spoil != "missing":
        path.mkdir()
    if spoil not in ("missing", "empty"):
        for file in directory.iterdir():
            (path / file.name).write_bytes(file.read_bytes())
    if spoil == "no_weights":
        (path / "model.safetensors").unlink()
    if spoil == "bad_weights":
        (path / "model.safetensors").write_bytes(b"\x00\x01")
    if spoil == "bad_config":
        (path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be loaded") as caught:
        EncoderEmbedder(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pooling": "max"}, "pooling must be one of mean, cls, last, found 'max'"),
        ({"device": "abacus"}, "cannot be loaded.*abacus"),
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1"),
    ],
)
def test_settings_that_cannot_be_are_one_clear_line(directory, options, message):
    with pytest.raises(GraphPOError, match=message) as caught:
        EncoderEmbedder(directory, **options)
    assert "\n" not in str(caught.value)


def test_a_model_that_needs_more_than_tokens_is_one_clear_line(tmp_path):
    sizes = {"d_model": 16, "d_ff": 32, "num_layers": 1, "num_heads": 2, "d_kv": 8}
    AutoModel.from_config(T5Config(vocab_size=len(WORDS), **sizes)).save_pretrained(tmp_path)
    bert_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"embeds no text: .*decoder_input_ids.*; name") as caught:
        EncoderEmbedder(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", "[]"),
        ("config.json", "{"),
        ("tokenizer.json", "null"),
        ("tokenizer.json", "{}"),
        ("pytorch_model.bin", "junk"),
        ("model.safetensors", "junk"),
    ],
)
def test_a_damaged_file_is_one_line(directory, tmp_path, file, content):
    shutil.copytree(directory, tmp_path / "damaged")
    if file == "pytorch_model.bin":
        (tmp_path / "damaged/model.safetensors").unlink()
    (tmp_path / "damaged" / file).write_text(content)
    with pytest.raises(ModelError, match=r"damaged' cannot be loaded: .* give a directory") as one:
        EncoderEmbedder(tmp_path / "damaged")
    assert "\n" not in str(one.value) and ".;" not in str(one.value)
