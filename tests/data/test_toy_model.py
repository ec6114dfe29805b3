import json
import re
from contextlib import contextmanager
from resource import RLIM_INFINITY, RLIMIT_FSIZE, setrlimit

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from graphpo_agent.data.tasks import load_demonstrations, load_tasks
from graphpo_agent.data.toy_hops import hops_phrases, make_hops
from graphpo_agent.data.toy_kb import kb_phrases, make_kb
from graphpo_agent.data.toy_model import make_toy_model
from graphpo_agent.data.toy_reach import make_reach, reach_phrases
from graphpo_agent.data.toy_trace import make_trace, trace_phrases
from graphpo_agent.errors import ConfigError, ModelError
from graphpo_agent.toy import WRITINGS

WRITING = WRITINGS["search_r1"]


def texts_of(directory):
    for demonstration in load_demonstrations(directory / "demonstrations.jsonl"):
        yield demonstration.messages[0]["content"]
        yield from (piece.text for piece in demonstration.pieces)


@pytest.fixture(scope="module")
def kb(tmp_path_factory):
    directory = tmp_path_factory.mktemp("kb")
    make_kb(
        directory,
        writing=WRITING,
        num_train=500,
        num_heldout=100,
        num_demonstrations=1000,
        num_entities=120,
    )
    size = make_toy_model(directory / "model", texts_of(directory), phrases=kb_phrases(WRITING))
    return directory, size, AutoTokenizer.from_pretrained(directory / "model")


def pieces(tokenizer, text):
    return [tokenizer.decode([i]) for i in tokenizer.encode(text, add_special_tokens=False)]


def test_every_word_of_the_agents_transcript_is_one_token(kb):
    directory, _, tokenizer = kb
    for demonstration in load_demonstrations(directory / "demonstrations.jsonl")[:50]:
        rendered = tokenizer.apply_chat_template(
            demonstration.messages, add_generation_prompt=True, return_dict=False
        )
        assert len(rendered) <= 40
        for piece in demonstration.pieces:
            words = re.sub(r"</?\w+>", r" \g<0> ", piece.text).split()
            tokens = pieces(tokenizer, piece.text)
            if piece.trained:
                assert [token.strip() for token in tokens] == words
            else:
                assert len(tokens) <= 15


def test_names_never_met_in_training_are_made_of_known_tokens(kb):
    directory, _, tokenizer = kb
    for task in load_tasks(directory / "heldout.jsonl"):
        words = task.question.removeprefix("when: ").split()
        assert pieces(tokenizer, task.question)[2:] == [f" {word}" for word in words]


def test_any_text_survives_and_specials_are_what_the_model_says(kb):
    directory, _, tokenizer = kb
    for text in ("Ünïcode ✓ \n\n x  y", " Karo born 1987.", "<think></think>", " 1987 1954 12"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    config = json.loads((directory / "model" / "config.json").read_text())
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.eos_token_id == config["eos_token_id"]
    assert (
        tokenizer.pad_token == "<|endoftext|>" and tokenizer.pad_token_id != config["eos_token_id"]
    )
    assert config["pad_token_id"] == tokenizer.pad_token_id
    tag = tokenizer.encode("<search>", split_special_tokens=True)
    assert len(tag) == 1
    assert tokenizer.decode(tag, skip_special_tokens=True) == "<search>"


def test_the_chat_template_is_chatml(kb):
    *_, tokenizer = kb
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_model_is_a_small_qwen2_with_tied_wide_embeddings(kb):
    directory, size, tokenizer = kb
    model = AutoModelForCausalLM.from_pretrained(directory / "model")
    assert type(model).__name__ == "Qwen2ForCausalLM"
    assert model.num_parameters() == size
    assert 100_000 <= size <= 2_000_000
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.std().item() == pytest.approx(64**-0.5, rel=0.05)
    logits = model(torch.tensor([tokenizer.encode("when: first")])).logits
    assert logits.shape[-1] == len(tokenizer) and torch.isfinite(logits).all()


def test_the_seed_decides_the_weights_and_the_callers_random_numbers_are_left_alone(tmp_path):
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make_toy_model(tmp_path / name, ["one two"], seed=seed, hidden_size=16, num_layers=1)
    assert torch.equal(before, torch.random.get_rng_state())
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c


def test_its_sizes_are_those_asked_for_and_it_samples_unless_told_otherwise(tmp_path):
    sizes = {"hidden_size": 16, "num_layers": 1, "num_heads": 4, "max_context_tokens": 96}
    make_toy_model(tmp_path, ["one two"], **sizes)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["hidden_size"], config["num_hidden_layers"]) == (16, 1)
    assert (config["num_attention_heads"], config["max_position_embeddings"]) == (4, 96)
    assert json.loads((tmp_path / "generation_config.json").read_text())["do_sample"] is True


@contextmanager
def largest_file(size):
    setrlimit(RLIMIT_FSIZE, (size, RLIM_INFINITY))
    try:
        yield
    finally:
        setrlimit(RLIMIT_FSIZE, (RLIM_INFINITY, RLIM_INFINITY))


@pytest.mark.parametrize(
    ("hidden_size", "name"), [(64, "model.safetensors"), (4, "tokenizer.json")]
)
def test_a_file_that_finds_no_room_is_one_line(tmp_path, hidden_size, name):
    make_toy_model(tmp_path, ["one two"], hidden_size=hidden_size, num_layers=1)
    size, file = max((file.stat().st_size, file.name) for file in tmp_path.iterdir())
    assert file == name
    with largest_file(size - 1), pytest.raises(ModelError, match=r"written .*File too large"):
        make_toy_model(tmp_path, ["one two"], hidden_size=hidden_size, num_layers=1)


def test_a_line_of_reach_has_four_tokens(tmp_path):
    make_reach(tmp_path, num_train=200, num_heldout=100, num_demonstrations=300)
    make_toy_model(tmp_path / "model", texts_of(tmp_path), phrases=reach_phrases(), hidden_size=32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert pieces(tokenizer, " +3 = 10 ; *2 = 20 ; -4 = 16") == (
        [" +3", " =", " 10", " ;", " *2", " =", " 20", " ;", " -4", " =", " 16"]
    )
    for task in load_tasks(tmp_path / "heldout.jsonl"):
        assert pieces(tokenizer, task.question) == [
            "from",
            *(f" {word}" for word in task.question.split()[1:]),
        ]


def test_a_line_of_trace_has_four_tokens(tmp_path):
    make_trace(tmp_path, num_train=200, num_heldout=100, num_demonstrations=300)
    make_toy_model(tmp_path / "model", texts_of(tmp_path), phrases=trace_phrases(), hidden_size=32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    for demonstration in load_demonstrations(tmp_path / "demonstrations.jsonl")[:50]:
        [piece] = demonstration.pieces
        assert pieces(tokenizer, piece.text) == [f" {word}" for word in piece.text.split()]
        assert len(pieces(tokenizer, piece.text)) == 16 * 4 - 1
    for task in load_tasks(tmp_path / "heldout.jsonl"):
        words = task.question.split()
        assert pieces(tokenizer, task.question) == ["from", *(f" {word}" for word in words[1:])]


def test_every_word_of_a_hops_transcript_is_one_token(tmp_path):
    sizes = {"num_train": 500, "num_heldout": 100, "num_demonstrations": 500, "num_entities": 120}
    make_hops(tmp_path, writing=WRITING, **sizes)
    phrases = hops_phrases(WRITING)
    make_toy_model(tmp_path / "model", texts_of(tmp_path), phrases=phrases, hidden_size=32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    for demonstration in load_demonstrations(tmp_path / "demonstrations.jsonl")[:50]:
        for piece in demonstration.pieces:
            words = re.sub(r"</?\w+>", r" \g<0> ", piece.text).split()
            tokens = pieces(tokenizer, piece.text)
            if piece.trained:
                assert [token.strip() for token in tokens] == words and len(words) <= 9
            else:
                assert len(tokens) <= 15
    for task in load_tasks(tmp_path / "heldout.jsonl"):
        words = task.question.removeprefix("who: ").split()
        assert pieces(tokenizer, task.question)[2:] == [f" {word}" for word in words]


def test_a_width_that_the_heads_do_not_divide_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="hidden_size 20 must be an even multiple of num_heads 4"):
        make_toy_model(tmp_path, ["one"], hidden_size=20, num_heads=4)
