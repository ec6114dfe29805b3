"""Text to vectors with a frozen encoder (paper, section 3.2), through torch and transformers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModel

from graphpo_agent.errors import ModelError, first_line
from graphpo_agent.net.checks import check_counts
from graphpo_agent.plain_text import plain_text
from graphpo_agent.pretrained import load_pretrained, most_tokens

__all__ = ["EncoderEmbedder", "Pooling"]

Pooling = Literal["mean", "cls", "last"]


class EncoderEmbedder:
    """Pooled last hidden states of any Hugging Face encoder or decoder; an ``Embedder``.

    Follow the model's own card for ``pooling`` and ``prefix``: E5 takes ``mean`` and ``"query: "``,
    BGE ``cls``, SFR-Embedding-2_R ``last``. What cosine separates equal from different states
    depends on the model: calibrate the merge threshold for each.

    Example::

        EncoderEmbedder("intfloat/e5-base-v2", prefix="query: ").embed(["known: 3 4"]).shape
            == (1, 768)
    """

    def __init__(
        self,
        model: str | Path,
        *,
        pooling: Pooling = "mean",
        normalize: bool = True,
        prefix: str = "",
        batch_size: int = 32,
        max_tokens: int = 512,
        device: str = "cpu",
    ) -> None:
        """Load the model.

        Args:
            model: a directory in the Hugging Face layout, or a model name.
            pooling: over the tokens of a text: their mean, the first or the last.
            normalize: scale every vector to length 1.
            prefix: written before every text.
            batch_size: texts per forward pass.
            max_tokens: longer texts lose their end; no more than tokenizer and model allow.
            device: where the encoder runs.

        Raises:
            ModelError: there is no usable model or tokenizer at ``model``, it needs more than a
                text's tokens (T5), no such pooling or no such device.
            ToolError: a size that is no whole number of at least 1.
        """
        if pooling not in get_args(Pooling):
            known = ", ".join(get_args(Pooling))
            raise ModelError(f"encoder {model}: pooling must be one of {known}, found {pooling!r}")
        check_counts(f"encoder {model}", batch_size=batch_size, max_tokens=max_tokens)
        # Last hidden states do not pass through the pooler, which many are published without.
        self._tokenizer, self._model = load_pretrained(
            "encoder", str(model), AutoModel, device=device, optional="pooler."
        )
        self._pooling: Pooling = pooling
        self._normalize = normalize
        self._prefix = prefix
        self._batch_size = batch_size
        self._max_tokens = min(max_tokens, most_tokens(self._tokenizer, self._model))
        self._device = device
        try:  # also tells the tokenizer where to cut, which it takes from one thread only
            self.embed(["a"])
        except Exception as error:  # of no narrower kind: each architecture has its own
            raise ModelError(
                f"encoder {model} embeds no text: {first_line(error)}; name an encoder alone, or a "
                "decoder alone"
            ) from error

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """[num_texts, hidden size]; a text without any character but spaces is a row of zeros."""
        vectors = np.zeros((len(texts), self._model.config.hidden_size), dtype=np.float32)
        rows = [self._encode(text) if text.strip() else [] for text in texts]
        by_length = sorted((i for i, row in enumerate(rows) if row), key=lambda i: len(rows[i]))
        for start in range(0, len(by_length), self._batch_size):
            batch = by_length[start : start + self._batch_size]
            vectors[batch] = self._forward([rows[i] for i in batch])
        return vectors

    def _encode(self, text: str) -> list[int]:
        encoded = self._tokenizer(
            self._prefix + plain_text(text), truncation=True, max_length=self._max_tokens
        )
        return encoded["input_ids"]

    @torch.inference_mode()
    def _forward(self, rows: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """[len(rows), hidden size]; padding is on the right and not attended to."""
        lengths = torch.tensor([len(row) for row in rows])
        width = int(lengths.max())
        input_ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
        mask = torch.arange(width)[None, :] < lengths[:, None]
        hidden = self._model(
            input_ids=input_ids.to(self._device), attention_mask=mask.long().to(self._device)
        ).last_hidden_state.cpu()
        pooled = _pool(hidden, mask, self._pooling)
        if self._normalize:
            pooled = torch.nn.functional.normalize(pooled, dim=-1)
        return pooled.numpy()


def _pool(hidden: torch.Tensor, mask: torch.Tensor, pooling: Pooling) -> torch.Tensor:
    """[batch, hidden size] from hidden states [batch, tokens, hidden size]; see ``pooling``."""
    if pooling == "cls":
        return hidden[:, 0]
    lengths = mask.sum(dim=1)
    if pooling == "last":
        return hidden[torch.arange(len(hidden)), lengths - 1]
    return (hidden * mask[:, :, None]).sum(dim=1) / lengths[:, None]
