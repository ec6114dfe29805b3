"""Attention over the stretches of a flat row, all of them in one FlashAttention kernel.

Shapes: H query heads, K key/value heads (H = G K), D dimensions of a key, Dv of a value, N tokens
of a flat row, S stretches of a row, P tokens of all their paths together.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from graphpo_agent.engines.local.arrays import to_device
from graphpo_agent.engines.local.packing import PackedBatch
from graphpo_agent.engines.local.pieces import Stretches
from graphpo_agent.engines.local.scoring import Scoring
from graphpo_agent.errors import ModelError
from graphpo_agent.graph.arrays import IntArray

__all__ = ["StretchLayout", "over_stretches", "stretch_layout"]


@dataclass(frozen=True, slots=True)
class StretchLayout:
    """Who attends to whom in one flat row of N tokens, stretch by stretch.

    The queries of a stretch are its tokens where they are in the row. Its keys are its whole path:
    a token sees those that come before it there.

    Attributes:
        keys: [P] positions in the row of the paths of all stretches, one after another.
        query_ends: [S + 1] int32, the first is 0: where each stretch ends.
        key_ends: [S + 1] int32 where each path ends among ``keys``.
        longest_stretch: tokens.
        longest_path: tokens, the stretch included.
    """

    keys: Tensor
    query_ends: Tensor
    key_ends: Tensor
    longest_stretch: int
    longest_path: int

    @property
    def sizes(self) -> tuple[Tensor, Tensor, int, int]:
        """As the kernel takes them."""
        return self.query_ends, self.key_ends, self.longest_stretch, self.longest_path


def stretch_layout(batch: PackedBatch, device: torch.device) -> StretchLayout:
    """The paths of a row's stretches."""
    stretches = Stretches.of(batch)
    paths = stretches.before + stretches.lengths
    ends = np.cumsum(paths)
    keys = np.empty(ends[-1], np.int64)
    whole = np.zeros_like(paths)  # nothing is left out
    stretches.write_paths(keys, ends - paths, np.arange(len(paths)), paths, whole)
    return StretchLayout(
        to_device(keys, device),
        _ends(np.cumsum(stretches.lengths), device),
        _ends(ends, device),
        int(stretches.lengths.max()),
        int(paths.max()),
    )


def _ends(ends: IntArray, device: torch.device) -> Tensor:
    return to_device(np.concatenate([[0], ends]).astype(np.int32), device)


def over_stretches(
    queries: Tensor, keys: Tensor, values: Tensor, layout: StretchLayout, scoring: Scoring
) -> Tensor:
    """Attention of every stretch to its path.

    Args:
        queries: [N, H, D], in 16 bits on a GPU.
        keys: [N, K, D].
        values: [N, K, Dv].
        layout: of the row.
        scoring: the layer's.

    Returns:
        [N, H, Dv].

    Raises:
        ModelError: scores are bounded.
    """
    if scoring.cap is not None:
        raise ModelError(
            "a layer bounds its scores and config.json says nothing of it; use another model family"
        )
    dim, given = queries.shape[-1], values.shape[-1]
    if dim < given:  # the kernel takes one size, and zeros more change no score
        queries, keys = (F.pad(x, (0, given - dim)) for x in (queries, keys))
    if given < dim:
        values = F.pad(values, (0, dim - given))
    out = _OverStretches.apply(queries, keys, values, scoring.sinks, layout, scoring)
    return out if given >= dim else out[..., :given]


class _OverStretches(torch.autograd.Function):
    """Gathers keys and values in both passes, so that none of the P tokens are kept between them.

    Their gradients are added up in float32: those of a prompt's tokens have a part from every
    stretch behind it.

    The kernel knows no sinks. With s the sink's score, its output is too large by the factor
    exp(logsumexp) + exp(s) to exp(logsumexp). Its backward pass finds the weights anew from the
    logsumexp: given the output as it should be and the logsumexp of all scores, the sink's among
    them, it gives the gradients with the sink.
    """

    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        sinks: Tensor | None,
        layout: StretchLayout,
        scoring: Scoring,
    ) -> Tensor:
        """Attention; what is kept is as long as the row."""
        out, *rest = torch.ops.aten._flash_attention_forward(
            queries,
            keys.index_select(0, layout.keys),
            values.index_select(0, layout.keys),
            *layout.sizes,
            dropout_p=0.0,
            return_debug_mask=False,
            **_kernel(scoring),
        )
        logsumexp, rng_state, unused, _ = rest
        if sinks is not None:
            with_sinks = torch.logaddexp(logsumexp, sinks.to(logsumexp.dtype)[:, None])
            out = out * (logsumexp - with_sinks).exp().T[:, :, None].to(out.dtype)
            logsumexp = with_sinks
        ctx.save_for_backward(queries, keys, values, sinks, out, logsumexp, rng_state, unused)
        ctx.layout, ctx.scoring = layout, scoring
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of queries, keys, values and sinks."""
        queries, keys, values, sinks, out, logsumexp, rng_state, unused = ctx.saved_tensors
        of_queries, of_keys, of_values = torch.ops.aten._flash_attention_backward(
            gradients[0],
            queries,
            keys.index_select(0, ctx.layout.keys),
            values.index_select(0, ctx.layout.keys),
            out,
            logsumexp,
            *ctx.layout.sizes,
            dropout_p=0.0,
            rng_state=rng_state,
            unused=unused,
            **_kernel(ctx.scoring),
        )
        of_sinks = None
        if sinks is not None:  # a sink's weight times what it takes from the others
            weights = (sinks.to(logsumexp.dtype)[:, None] - logsumexp).exp()
            taken = (gradients[0].to(logsumexp.dtype) * out.to(logsumexp.dtype)).sum(-1)
            of_sinks = -(weights * taken.T).sum(1).to(sinks.dtype)
        return (
            of_queries,
            _added_up(of_keys, ctx.layout.keys, keys),
            _added_up(of_values, ctx.layout.keys, values),
            of_sinks,
            None,
            None,
        )


def _kernel(scoring: Scoring) -> dict[str, Any]:
    """In the kernel's words, which aligns queries with the ends of their paths."""
    if scoring.window is None:
        return {"scale": scoring.scaling, "is_causal": True}
    sizes = {"window_size_left": scoring.window - 1, "window_size_right": 0}
    return {"scale": scoring.scaling, "is_causal": False} | sizes


def _added_up(gathered: Tensor, index: Tensor, like: Tensor) -> Tensor:
    """[N, K, D] sums, at [P] places, of [P, K, D] gradients."""
    precise = torch.promote_types(like.dtype, torch.float32)
    total = torch.zeros_like(like, dtype=precise)
    return total.index_add_(0, index, gathered.to(precise)).to(like.dtype)
