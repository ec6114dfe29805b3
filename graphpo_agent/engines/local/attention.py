"""Running a stock transformers causal LM with an attention function of our own.

``attention`` switches a model to such a function for the length of a ``with`` block: the sampler's,
which stands here, or the flat rows' (``flat_attention.py``). Both are registered under
transformers' ``AttentionInterface``.

Shapes: H query heads, K key/value heads, D dimensions of a key, Dv of a value, N tokens of a row.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from graphpo_agent.engines.local.handed_on import handed_on
from graphpo_agent.engines.local.linear_attention import over_recurrence
from graphpo_agent.engines.local.scoring import Scoring
from graphpo_agent.errors import ModelError

__all__ = [
    "CachedAttention",
    "attention",
    "cached_attention",
    "eager_attention",
    "no_mask",
]

AttentionName = Literal["graphpo_cached", "graphpo_flat"]


class CachedAttention(Protocol):
    """Knows the cache that a sampler's pass attends to."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """[1, N, H, Dv] for [1, H, N, D] queries, [1, K, N, D] keys and [1, K, N, Dv] values."""
        ...


def cached_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    cached_pass: CachedAttention | None = None,
    **extras: Any,
) -> tuple[Tensor, None]:
    """Attention of a sampler's pass to the keys and values computed before.

    Args:
        module: the attention layer (unused; the interface passes it).
        query: [1, H, N, D].
        key: [1, K, N, D].
        value: [1, K, N, Dv].
        attention_mask: unused; ``cached_pass`` knows who sees whom.
        scaling: factor on the dot products.
        softcap: bound on the scores; None: there is none.
        sliding_window: tokens that are attended to, a token itself included; None: all.
        s_aux: [H] attention sinks; None: there are none.
        cached_pass: reaches this function as a keyword argument of the model's call.
        **extras: other arguments of the interface.

    Returns:
        [1, N, H, Dv] and None (no attention weights).

    Raises:
        ModelError: no pass reaches the layer.
    """
    # Under autocast rotary embeddings give float32, and the cache holds one type.
    query, key = query.to(value.dtype), key.to(value.dtype)
    scoring = Scoring(scaling, sliding_window, s_aux, softcap)
    return handed_on(cached_pass).attend(query, key, value, scoring), None


@contextmanager
def eager_attention(model: PreTrainedModel) -> Iterator[None]:
    """The model computes as transformers defines it inside the ``with`` block.

    Its faster attention leaves out bounds on scores (Gemma 2).
    """
    with _switched(model, "eager"):
        yield


@contextmanager
def attention(model: PreTrainedModel, name: AttentionName) -> Iterator[None]:
    """Run ``model`` with one of our attention functions inside the ``with`` block.

    Its linear attention layers, where it has some, compute as ``over_recurrence`` says.

    Raises:
        ModelError: the model does not use transformers' attention interface.
    """
    with _switched(model, name), over_recurrence(model):
        yield


@contextmanager
def _switched(model: PreTrainedModel, name: str) -> Iterator[None]:
    before = model.config._attn_implementation
    assert before is not None, "transformers sets one when it makes a model"
    model.set_attn_implementation(name)
    if model.config._attn_implementation != name:
        raise ModelError(
            f"model {model.name_or_path} ({type(model).__name__}) does not use transformers' "
            "attention interface; use another model family"
        )
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def no_mask(*_: Any, **__: Any) -> None:
    """A mask factory: the functions here bring their own masks."""
    return None


AttentionInterface.register("graphpo_cached", cached_attention)
AttentionMaskInterface.register("graphpo_cached", no_mask)
