"""Corpora and encoders for the retrievers' tests."""

import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    PreTrainedTokenizerFast,
)

TREES = ["alder", "birch", "cedar", "elm", "fir", "maple", "oak", "pine", "spruce", "willow"]
WORDS = [f"{tree}{number}" for tree in TREES for number in range(20)]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "query", "passage", ":", '"', *TREES]


def write_corpus(path: Path, contents: list[str], first: int = 0) -> Path:
    rows = ({"id": f"d{i}", "contents": text} for i, text in enumerate(contents, start=first))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def passages(count: int, seed: int = 0, words: int = 12) -> list[str]:
    """Titles and texts in which some words are common and most are rare."""
    rng = random.Random(seed)
    weights = [1 / (rank + 1) for rank in range(len(WORDS))]
    return [
        f'"Page {100 + i}"\n' + " ".join(rng.choices(WORDS, weights, k=rng.randint(3, words)))
        for i in range(count)
    ]


def make_encoder(path: Path, num_labels: int | None = None) -> Path:
    """A tiny random BERT, or cross-encoder, in the Hugging Face layout."""
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    words.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", model_max_length=64
    )
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "initializer_range": 0.5}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64}
    if num_labels is None:
        model = BertModel(BertConfig(vocab_size=len(vocabulary), **sizes))
    else:
        config = BertConfig(vocab_size=len(vocabulary), num_labels=num_labels, **sizes)
        model = BertForSequenceClassification(config)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path
