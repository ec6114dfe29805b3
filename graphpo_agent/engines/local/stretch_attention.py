"""Attention over the stretches of a flat row, all of them in one FlashAttention kernel.

Shapes: H query heads, K key/value heads (H = G K), D head dimension, N tokens of a flat row,
S stretches of a row, P tokens of all their paths together.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from graphpo_agent.engines.local.arrays import to_device
from graphpo_agent.engines.local.packing import PackedBatch
from graphpo_agent.engines.local.pieces import Stretches
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
        window: tokens of its path that a token sees at most, itself included; None: all.
    """

    keys: Tensor
    query_ends: Tensor
    key_ends: Tensor
    longest_stretch: int
    longest_path: int
    window: int | None = None

    @property
    def kernel(self) -> dict[str, Any]:
        """Who sees whom, in the kernel's words; it aligns queries with the ends of their paths."""
        if self.window is None:
            return {"is_causal": True}
        return {"is_causal": False, "window_size_left": self.window - 1, "window_size_right": 0}

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
    stretches.write_paths(keys, ends - paths, np.arange(len(paths)), paths, 0 * paths)
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
    queries: Tensor, keys: Tensor, values: Tensor, layout: StretchLayout, scaling: float
) -> Tensor:
    """Attention of every stretch to its path.

    Args:
        queries: [N, H, D], in 16 bits on a GPU.
        keys: [N, K, D].
        values: [N, K, D].
        layout: of the row.
        scaling: factor on the dot products.

    Returns:
        [N, H, D].
    """
    return _OverStretches.apply(queries, keys, values, layout, scaling)


class _OverStretches(torch.autograd.Function):
    """Gathers keys and values in both passes, so that none of the P tokens are kept between them.

    Their gradients are added up in float32: those of a prompt's tokens have a part from every
    stretch behind it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        layout: StretchLayout,
        scaling: float,
    ) -> Tensor:
        """Attention; what is kept is as long as the row."""
        out, *rest = torch.ops.aten._flash_attention_forward(
            queries,
            keys.index_select(0, layout.keys),
            values.index_select(0, layout.keys),
            *layout.sizes,
            dropout_p=0.0,
            return_debug_mask=False,
            scale=scaling,
            **layout.kernel,
        )
        logsumexp, rng_state, unused, _ = rest
        ctx.save_for_backward(queries, keys, values, out, logsumexp, rng_state, unused)
        ctx.layout, ctx.scaling = layout, scaling
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of queries, keys and values."""
        queries, keys, values, out, logsumexp, rng_state, unused = ctx.saved_tensors
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
            scale=ctx.scaling,
            **ctx.layout.kernel,
        )
        return (
            of_queries,
            _added_up(of_keys, ctx.layout.keys, keys),
            _added_up(of_values, ctx.layout.keys, values),
            None,
            None,
        )


def _added_up(gathered: Tensor, index: Tensor, like: Tensor) -> Tensor:
    """[N, K, D] sums, at [P] places, of [P, K, D] gradients."""
    precise = torch.promote_types(like.dtype, torch.float32)
    total = torch.zeros_like(like, dtype=precise)
    return total.index_add_(0, index, gathered.to(precise)).to(like.dtype)
