"""Drawing tokens from logits, and seeing when a drawn token ends the text.

Shapes: B rows, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from graphpo_agent.errors import ModelError
from graphpo_agent.graph.arrays import BoolArray, FloatArray
from graphpo_agent.protocols import Tokenizer
from graphpo_agent.types import FinishReason, SamplingParams

__all__ = ["StopFinder", "UniformNumbers", "check_finite", "draw"]

_LOW = 2**64 - 1
_BLOCK = 1024
"""Weights that are added up one by one."""


class UniformNumbers:
    """Numbers in [0, 1) that depend on a seed and their place only.

    Those of one seed are the output of a Philox counter-based generator with that key.
    """

    def __init__(self) -> None:
        # One generator for all seeds: making one costs more than what is drawn from it.
        self._philox = np.random.Philox(key=0)
        self._generator = np.random.Generator(self._philox)
        self._state = self._philox.state

    def take(self, seed: int, start: int, count: int) -> FloatArray:
        """[count] numbers of a seed (0 <= seed < 2**128), from number ``start`` on.

        ``start`` is a multiple of 4, which is what one count of the generator gives.
        """
        state = self._state["state"]
        state["key"] = np.array([seed & _LOW, seed >> 64], np.uint64)
        state["counter"] = np.array([start // 4, 0, 0, 0], np.uint64)
        self._philox.state = self._state
        return self._generator.random(count)


def check_finite(logprobs: FloatArray | float, model_name: str | None) -> None:
    """Raise ModelError unless the log-probabilities of what was drawn are finite."""
    if not np.isfinite(logprobs).all():
        raise ModelError(
            f"model {model_name}: its logits are not finite, the policy has diverged; lower "
            "update.learning_rate, or give sound weights"
        )


def draw(logits: Tensor, uniform: Tensor, sampling: SamplingParams) -> tuple[Tensor, Tensor]:
    """One token per row by inverting the cumulative distribution at ``uniform``.

    Args:
        logits: [B, V], any floating type.
        uniform: [B] float64 in [0, 1).
        sampling: temperature 0 takes the likeliest token.

    Returns:
        [B] token ids and their [B] log-probabilities before the top-p truncation, at the
        sampling temperature (at temperature 1 where that is 0). Logits that are not finite give
        some token of the vocabulary and NaN.
    """
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if sampling.temperature not in (0.0, 1.0):
        scores = scores / sampling.temperature
    largest = scores.amax(-1, keepdim=True)
    weights = (scores - largest).exp_()
    total = weights.sum(-1, dtype=torch.float64)
    if sampling.temperature == 0.0:
        tokens = scores.argmax(-1)
    elif sampling.top_p == 1.0:
        tokens = _first_above(weights, uniform * total)
    else:
        kept = _truncated(weights, sampling.top_p)
        tokens = _first_above(kept, uniform * kept.sum(-1, dtype=torch.float64))
    logprobs = (scores.gather(1, tokens[:, None]) - largest)[:, 0] - total.log().to(scores.dtype)
    return tokens, logprobs


def _truncated(weights: Tensor, top_p: float) -> Tensor:
    """Weights of the fewest likeliest tokens that hold ``top_p`` of the sum; else 0."""
    ordered, order = weights.sort(dim=-1, descending=True, stable=True)
    mass = ordered.cumsum(-1) - ordered
    outside = mass >= top_p * ordered.sum(-1, keepdim=True)
    return torch.zeros_like(weights).scatter(1, order, ordered.masked_fill(outside, 0.0))


def _first_above(weights: Tensor, level: Tensor) -> Tensor:
    """[B] the first token of positive weight up to which [B, V] weights add up to over ``level``.

    Of a large vocabulary the block is sought first and then the token in it, so that hardly any
    weights are added up one by one. Where the weights are NaN it is the last token.
    """
    vocabulary = weights.shape[1]
    if vocabulary <= _BLOCK:
        cumulative = weights.cumsum(-1, dtype=torch.float64)
        # Rounding may have put the level outside, where the weights are 0.
        level = torch.minimum(level.clamp(min=0.0), cumulative[:, -1] * (1.0 - 2.0**-40))
        found = torch.searchsorted(cumulative, level[:, None], right=True)[:, 0]
        return found.clamp_(max=vocabulary - 1)
    whole = vocabulary - vocabulary % _BLOCK
    blocks = weights[:, :whole].unflatten(1, (-1, _BLOCK))
    sums = blocks.sum(-1, dtype=torch.float64)
    if whole < vocabulary:
        rest = weights[:, whole:].sum(-1, keepdim=True, dtype=torch.float64)
        sums = torch.cat([sums, rest], 1)
    block = _first_above(sums, level)[:, None]
    before = sums.cumsum(-1).gather(1, block) - sums.gather(1, block)
    columns = block * _BLOCK + torch.arange(_BLOCK, device=block.device)
    inside = weights.gather(1, columns.clamp(max=vocabulary - 1))
    inside.masked_fill_(columns >= vocabulary, 0.0)
    token = block[:, 0] * _BLOCK + _first_above(inside, level - before[:, 0])
    return token.clamp_(max=vocabulary - 1)


class StopFinder:
    """Finds the token that completes a stop string, decoding only where that is possible.

    A token can complete a stop string only if the token's text starts with an end of that
    string or contains it. Those tokens are looked up in a table; only for them is the text of
    the row decoded.

    Attributes:
        vocab_size: V.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """Args: the tokenizer, and V of the logits (ids beyond the tokenizer's stop nothing)."""
        self._tokenizer = tokenizer
        self.vocab_size = vocab_size
        self._texts: list[str] | None = None
        self._tables: dict[tuple[str, ...], BoolArray] = {}

    def table(self, stop: tuple[str, ...]) -> BoolArray:
        """[V] whether a token can complete one of the ``stop`` strings."""
        if stop not in self._tables:
            texts = self._token_texts() if stop else [""] * self.vocab_size
            self._tables[stop] = np.array([_can_complete(text, stop) for text in texts])
        return self._tables[stop]

    def ends(
        self, token_ids: Sequence[int], stop: tuple[str, ...], min_new_tokens: int
    ) -> FinishReason | None:
        """Whether the last of a continuation's tokens ends it, and why, but for its length."""
        last = token_ids[-1]
        if last in self._tokenizer.eos_ids:
            return "eos"
        if not stop or len(token_ids) < min_new_tokens or not self.table(stop)[last]:
            return None
        return "stop" if self.completes(token_ids, stop) else None

    def completes(self, token_ids: Sequence[int], stop: tuple[str, ...]) -> bool:
        """Whether the last token completes a stop string in the text of ``token_ids``."""
        own = self._token_texts()[token_ids[-1]]
        if any(s in own for s in stop):
            return True
        text = self._tokenizer.decode(token_ids)
        if not any(s in text for s in stop):
            return False
        # A character that is still incomplete decodes to U+FFFD and is not text yet.
        before = len(self._tokenizer.decode(token_ids[:-1]).rstrip("\ufffd"))
        return any(text.find(s, max(0, before - len(s) + 1)) >= 0 for s in stop)

    def _token_texts(self) -> list[str]:
        """[V] what each token adds to a text that has already begun."""
        if self._texts is None:
            decode = self._tokenizer.decode
            known = range(self._tokenizer.vocab_size)
            anchor = next(i for i in known if decode([i]).isalnum())
            start = len(decode([anchor]))
            texts = [decode([anchor, i])[start:] for i in known]
            self._texts = texts + [""] * (self.vocab_size - len(texts))
        return self._texts


def _can_complete(token_text: str, stop: tuple[str, ...]) -> bool:
    if "\ufffd" in token_text:  # part of a character: only the whole row tells
        return True
    return any(
        s in token_text or any(token_text.startswith(s[-k:]) for k in range(1, len(s) + 1))
        for s in stop
    )
