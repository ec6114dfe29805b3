"""The text of a path, made piece by piece, is the text of the whole path."""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from graphpo_agent.engines.tokenizer import HfTokenizer
from graphpo_agent.rollout.path import text_behind
from tests.rollout.scripted import ByteTokenizer

BYTES = [f"<0x{value:02X}>" for value in range(256)]


def wrapped(backend: Tokenizer) -> HfTokenizer:
    """With an end-of-sequence token, which leaves no text."""
    return HfTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>"))


@cache
def byte_level() -> HfTokenizer:
    """Bytes, and pieces that begin or end inside a character (GPT-2, Qwen, Llama 3)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ã", "©"), ("æ", "¼"), ("¢", "å"), ("Ġ", "a"), ("ð", "Ł"), ("ĺ", "Ģ")]
    words = [*alphabet, *("".join(pair) for pair in merges), "<eos>"]
    backend = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return wrapped(backend)


@cache
def sentence_pieces() -> HfTokenizer:
    """Words with their space before them, which a text's first word loses; bytes for the rest."""
    words = [*BYTES, "▁", "▁a", "▁the", "b", ".", "▁é", "<eos>"]
    backend = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return wrapped(backend)


@cache
def word_pieces() -> HfTokenizer:
    """Words, and pieces of words that hang on to what is before them (BERT)."""
    words = ["a", "the", "##b", "##c", ".", "é", "##é", "<eos>"]
    backend = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="a"))
    backend.decoder = decoders.WordPiece()
    return wrapped(backend)


def ids(tokenizer: HfTokenizer) -> st.SearchStrategy[list[int]]:
    """Often the bytes of characters that take two, three and four of them."""
    any_id = st.integers(0, tokenizer.vocab_size - 1)
    words = tokenizer.hf.get_vocab()
    spelled = []
    for character in "é漢😀\u200d":
        names = [f"<0x{value:02X}>" for value in character.encode()]
        if all(name in words for name in names):
            spelled.append([words[name] for name in names])
    pieces = st.one_of(any_id.map(lambda i: [i]), *(st.just(each) for each in spelled))
    return st.lists(pieces, max_size=30).map(lambda many: [i for each in many for i in each])


@pytest.mark.parametrize("make", [byte_level, sentence_pieces, word_pieces])
@settings(max_examples=300)
@given(data=st.data())
def test_text_made_piece_by_piece_is_that_of_the_whole(make, data):
    tokenizer = make()
    token_ids = tuple(data.draw(ids(tokenizer)))
    cuts = data.draw(st.lists(st.integers(0, len(token_ids)), max_size=6))
    text, start = "", 0
    for end in [*sorted(cuts), len(token_ids)]:
        text = text_behind(tokenizer, text, token_ids[:end], start)
        assert text == tokenizer.decode(token_ids[:end])
        start = end


def test_a_long_path_is_not_decoded_as_a_whole():
    class Counting(ByteTokenizer):
        decoded = 0

        def decode(self, token_ids):
            self.decoded += len(token_ids)
            return super().decode(token_ids)

    tokenizer = Counting()
    token_ids = tuple(b"a line of a long response\n" * 200)
    text = text_behind(tokenizer, "a line of a long response\n" * 199, token_ids, 26 * 199)
    assert text == "a line of a long response\n" * 200
    assert tokenizer.decoded < 100
