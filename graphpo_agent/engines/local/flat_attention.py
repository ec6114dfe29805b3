"""Attention over one flat row that holds each token once: who attends to whom, computed two ways.

Keys and values are gathered for every piece of the row (see ``pieces``). On a GPU that multiplies
in 16 bits the pieces are the row's stretches, all of them in one FlashAttention kernel; elsewhere
pieces of similar length are computed together. Layers with a sliding window have a layout of their
own.

Shapes: H query heads, K key/value heads (H = G K), D dimensions of a key, Dv of a value, N tokens
of a flat row, E pieces of a bucket, Q queries, T keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig
from transformers.masking_utils import AttentionMaskInterface

from graphpo_agent.engines.local.arrays import to_device
from graphpo_agent.engines.local.attention import no_mask
from graphpo_agent.engines.local.handed_on import handed_on
from graphpo_agent.engines.local.kernels import grouped_attention
from graphpo_agent.engines.local.kv_layers import widest_head
from graphpo_agent.engines.local.packing import PackedBatch
from graphpo_agent.engines.local.pieces import cut_into_buckets
from graphpo_agent.engines.local.reach import layer_windows
from graphpo_agent.engines.local.scoring import Scoring
from graphpo_agent.engines.local.stretch_attention import (
    StretchLayout,
    over_stretches,
    stretch_layout,
)
from graphpo_agent.errors import ModelError
from graphpo_agent.graph.arrays import BoolArray, IntArray

__all__ = ["BucketLayout", "FlatLayouts", "flash_fits"]


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """Who attends to whom in one flat row of N tokens, bucket by bucket.

    Attributes:
        queries: positions in the row of the queries of all buckets, [E, Q] each, flattened.
        keys: positions of the keys of all buckets, [E, T] each, flattened.
        shapes: per bucket E, Q and T.
        masks: per bucket of blocks [E, 1, Q, T] additive, 0 where a query may see a key, -inf
            elsewhere; None of runs.
        order: [N] for every token of the row its place among ``queries``.
    """

    queries: Tensor
    keys: Tensor
    shapes: tuple[tuple[int, int, int], ...]
    masks: tuple[Tensor | None, ...]
    order: Tensor


Layout = StretchLayout | BucketLayout


class FlatLayouts:
    """The layouts of one flat row, one for each sliding window of a model's layers.

    Layers tell their windows when they compute; ``check`` holds them against the configuration.

    Attributes:
        all: by window; None is the one of whole paths.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        batch: PackedBatch,
        dtype: torch.dtype,
        device: torch.device,
        flash: bool | None = None,
    ) -> None:
        """Lay a row out.

        Args:
            config: of the language model.
            batch: the row.
            dtype: of queries and keys.
            device: where the layouts are to lie.
            flash: whether FlashAttention computes them; by default where it can.
        """
        if flash is None:
            flash = flash_fits(config, dtype, device)
        self._config = config
        self._windows = layer_windows(config)
        self._told: set[int | None] = set()
        self._longest = int(batch.position_ids.max()) + 1
        windows = {self._binding(window) for window in self._windows}
        self.all: dict[int | None, Layout]
        if flash:
            self.all = dict.fromkeys(windows, stretch_layout(batch, device))
        else:
            self.all = {window: _bucket_layout(batch, window, dtype, device) for window in windows}

    def of(self, window: int | None) -> Layout:
        """The layout for a layer.

        Args:
            window: its sliding window, as it tells it.

        Raises:
            ModelError: the model's configuration names no such window.
        """
        self._told.add(window)
        layout = self.all.get(self._binding(window))
        if layout is None:
            raise self._told_otherwise()
        return layout

    def check(self) -> None:
        """Raise ModelError unless layers have told what the configuration says.

        A window as long as the longest context need not be told.
        """
        untold = [window for window in self._windows - self._told if window is not None]
        if any(window < self._config.max_position_embeddings for window in untold):
            raise self._told_otherwise()

    def _binding(self, window: int | None) -> int | None:
        """None where no path of the row is longer."""
        return None if window is None or window >= self._longest else window

    def _told_otherwise(self) -> ModelError:
        return ModelError(
            f"model {self._config.name_or_path}: its layers do not tell their attention of the "
            "sliding_window that config.json states; set that to null, or use another model family"
        )


def _bucket_layout(
    batch: PackedBatch, window: int | None, dtype: torch.dtype, device: torch.device
) -> BucketLayout:
    buckets, order = cut_into_buckets(batch, window)
    return BucketLayout(
        _flat([bucket.queries for bucket in buckets], device),
        _flat([bucket.keys for bucket in buckets], device),
        tuple((*bucket.queries.shape, bucket.keys.shape[1]) for bucket in buckets),
        tuple(
            None if bucket.causal else _additive(bucket.seen(batch), dtype, device)
            for bucket in buckets
        ),
        to_device(order, device),
    )


def flash_fits(config: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether FlashAttention is made for a model's heads, for such numbers and GPUs (from Ampere).

    Larger heads have a backward pass on some of these GPUs only. It knows no bound on scores.
    """
    widest = widest_head(config)
    return (
        device.type == "cuda"
        and getattr(config, "attn_logit_softcapping", None) is None
        and dtype in (torch.bfloat16, torch.float16)
        and widest % 8 == 0
        and widest <= 192
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


@torch.compiler.disable
def gathered_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    flat_layouts: FlatLayouts | None = None,
    **extras: Any,
) -> tuple[Tensor, None]:
    """Attention of every piece of a flat row to the gathered tokens of its path and to itself.

    Args:
        module: the attention layer (unused; the interface passes it).
        query: [1, H, N, D].
        key: [1, K, N, D].
        value: [1, K, N, Dv].
        attention_mask: unused; ``flat_layouts`` hold the masks.
        scaling: factor on the dot products.
        softcap: bound on the scores; None: there is none.
        sliding_window: tokens that are attended to, a token itself included; None: all.
        s_aux: [H] attention sinks; None: there are none.
        flat_layouts: reach this function as a keyword argument of the model's call.
        **extras: other arguments of the interface.

    Returns:
        [1, N, H, Dv] and None (no attention weights).

    Raises:
        ModelError: no layout reaches the layer, or the configuration says nothing of a bound.
    """
    layout = handed_on(flat_layouts).of(sliding_window)
    scoring = Scoring(scaling, sliding_window, s_aux, softcap)
    # Under autocast rotary embeddings give float32; the kernel would cast after the gathering.
    queries, keys, values = (x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value))
    if isinstance(layout, StretchLayout):
        out = over_stretches(queries, keys, values, layout, scoring)
    else:
        out = _over_buckets(queries, keys, values, layout, scoring)
    return out[None], None


def _over_buckets(
    queries: Tensor, keys: Tensor, values: Tensor, layout: BucketLayout, scoring: Scoring
) -> Tensor:
    """[N, H, Dv]."""
    shapes = layout.shapes
    outputs = [
        grouped_attention(q, k, v, mask, scoring).transpose(1, 2).flatten(0, 1)
        for q, k, v, mask in zip(
            _gather(queries, layout.queries, [(e, q) for e, q, _ in shapes]),
            _gather(keys, layout.keys, [(e, t) for e, _, t in shapes]),
            _gather(values, layout.keys, [(e, t) for e, _, t in shapes]),
            layout.masks,
            strict=True,
        )
    ]
    return torch.cat(outputs).index_select(0, layout.order)


def _gather(rows: Tensor, index: Tensor, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """[N, H, D] rows at flattened positions, as [E, H, L, D] for every (E, L)."""
    parts = rows.index_select(0, index).split([count * length for count, length in shapes])
    return [
        part.view(count, length, *rows.shape[1:]).transpose(1, 2)
        for part, (count, length) in zip(parts, shapes, strict=True)
    ]


def _flat(arrays: Sequence[IntArray], device: torch.device) -> Tensor:
    return to_device(np.concatenate([array.ravel() for array in arrays]), device)


def _additive(seen: BoolArray, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[E, 1, Q, T] 0 where ``seen`` [E, Q, T], else -inf."""
    mask = torch.where(torch.from_numpy(seen), 0.0, -torch.inf)
    return mask[:, None].to(device, dtype)


AttentionInterface.register("graphpo_flat", gathered_attention)
AttentionMaskInterface.register("graphpo_flat", no_mask)
