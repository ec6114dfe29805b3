"""A small sentence encoder, trained a little and then frozen; laid out on disk as E5 is."""

import json
import random
import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

import torch
from transformers import BertConfig, BertModel, BertTokenizer, PreTrainedTokenizerBase

from benchmarks.calibration_parts.states import DemonstratedState

__all__ = ["contrast", "train_encoder"]

TEMPERATURE = 0.05
LEARNING_RATE = 2e-3
TAIL, PATH = 200, 600
"""Characters of the path's end: what ``text`` shows by default, and most paths whole."""


def train_encoder(
    states: Sequence[DemonstratedState],
    directory: Path,
    *,
    steps: int,
    demonstrations: int = 16,
    states_each: int = 4,
) -> float:
    """Train an encoder on pairs of renderings of one state, and save it.

    A state is rendered as the end of its path, as its facts, and as its facts in another order.
    Two renderings are to be nearer to each other than to those of all other states of the batch
    (InfoNCE, both ways), of which some belong to the same question; states of a batch with
    equal facts are not told apart.

    Args:
        states: to learn from, those of one demonstration next to each other.
        directory: where the model goes, in the layout of sentence-transformers.
        steps: batches.
        demonstrations: of a batch.
        states_each: of each demonstration, at most.

    Returns:
        How often the right rendering was the nearest one, in the last ten batches.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        rng = random.Random("encoder")
        texts = [text for state in states[:4000] for text in (state.path.response, state.facts)]
        tokenizer = _tokenizer(texts, directory)
        model = BertModel(_config(len(tokenizer))).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps)
        right: list[float] = []
        for batch in _batches(states, steps, demonstrations, states_each, rng):
            left, other = zip(*(rng.sample(_renderings(s, rng), 2) for s in batch), strict=True)
            cosines = _embed(model, tokenizer, left) @ _embed(model, tokenizer, other).T
            loss, share = contrast(cosines, [state.facts for state in batch])
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            right.append(share)
    model.save_pretrained(directory)
    _write_modules(directory, model.config.hidden_size)
    return sum(right[-10:]) / len(right[-10:])


def _renderings(state: DemonstratedState, rng: random.Random) -> list[str]:
    """Three texts that say the same state."""
    response, parts = state.path.response, state.facts.split(" . ")
    tail = response[-rng.choice([TAIL, PATH]) :]
    return [tail, state.facts, " . ".join(rng.sample(parts, len(parts)))]


def _batches(
    states: Sequence[DemonstratedState],
    steps: int,
    demonstrations: int,
    each: int,
    rng: random.Random,
) -> Iterator[list[DemonstratedState]]:
    own = [list(group) for _, group in groupby(states, key=lambda state: state.demonstration)]
    for _ in range(steps):
        drawn = rng.sample(own, demonstrations)
        yield [state for group in drawn for state in rng.sample(group, min(each, len(group)))]


def contrast(cosines: torch.Tensor, facts: Sequence[str]) -> tuple[torch.Tensor, float]:
    """The loss, and how often the right one is the nearest; [n, n] cosines."""
    same = torch.tensor([[a == b for b in facts] for a in facts])
    twins = same & ~torch.eye(len(facts), dtype=torch.bool)
    logits = (cosines / TEMPERATURE).masked_fill(twins, -torch.inf)
    target = torch.arange(len(facts))
    entropy = torch.nn.functional.cross_entropy
    loss = (entropy(logits, target) + entropy(logits.T, target)) / 2
    return loss, (logits.argmax(dim=1) == target).double().mean().item()


def _embed(
    model: BertModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]
) -> torch.Tensor:
    """[texts, hidden size] means of the last hidden states, of length 1."""
    encoded = tokenizer(list(texts), padding=True, truncation=True, return_tensors="pt")
    hidden = model(**encoded).last_hidden_state
    mask = encoded["attention_mask"][:, :, None]
    return torch.nn.functional.normalize((hidden * mask).sum(dim=1) / mask.sum(dim=1), dim=-1)


def _tokenizer(texts: Sequence[str], directory: Path) -> BertTokenizer:
    """Every word of the texts is a token; any other is spelled in their characters."""
    shown = "\n".join(texts).lower()
    characters = set(re.sub(r"\s", "", shown))
    pieces = {*re.findall(r"\w+|[^\w\s]", shown), *characters, *(f"##{c}" for c in characters)}
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {piece: k for k, piece in enumerate([*special, *sorted(pieces)])}
    tokenizer = BertTokenizer(vocab=vocabulary, do_lower_case=True, model_max_length=512)
    tokenizer.save_pretrained(directory)
    return tokenizer


def _config(vocabulary: int) -> BertConfig:
    return BertConfig(
        vocab_size=vocabulary,
        hidden_size=96,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=192,
        max_position_embeddings=512,
    )


def _write_modules(directory: Path, hidden_size: int) -> None:
    """What tells sentence-transformers and vllm to take means and to scale them to length 1."""
    names = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {"idx": k, "name": str(k), "path": path, "type": f"sentence_transformers.models.{name}"}
        for k, (path, name) in enumerate(names.items())
    ]
    pooling = {"word_embedding_dimension": hidden_size, "pooling_mode_mean_tokens": True}
    limits = {"max_seq_length": 512, "do_lower_case": False}
    (directory / "1_Pooling").mkdir(exist_ok=True)
    files = {
        "modules.json": modules,
        "1_Pooling/config.json": pooling,
        "sentence_bert_config.json": limits,
    }
    for name, value in files.items():
        (directory / name).write_text(json.dumps(value, indent=1) + "\n")
