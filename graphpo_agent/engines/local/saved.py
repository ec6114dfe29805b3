"""What an update keeps for its backward pass, counted without memory and without arithmetic.

The model's own layers run over a flat row of tensors that have a shape and no numbers (torch's fake
tensors), and what autograd saves of them is counted: every family counts as it computes.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from graphpo_agent.engines.local.arrays import to_device
from graphpo_agent.engines.local.flat_attention import FlatLayouts, flash_fits
from graphpo_agent.engines.local.flat_recurrence import FlatRecurrence, recurrence_of
from graphpo_agent.engines.local.forward import flat_passes
from graphpo_agent.engines.local.head import output_head
from graphpo_agent.engines.local.kv_layers import kv_layers
from graphpo_agent.engines.local.language_model import language_model
from graphpo_agent.engines.local.options import ComputeOptions
from graphpo_agent.engines.local.packing import PackedBatch
from graphpo_agent.engines.local.stretch_attention import StretchLayout

__all__ = ["saved_bytes"]

_CPU = torch.device("cpu")


class _Answers(TorchDispatchMode):
    """What layers ask of tensors without numbers and torch has no answer to."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten._grouped_mm.default:  # of experts; torch's own is for bfloat16
            rows, matrices = args[:2]
            return rows.new_empty(rows.shape[0], matrices.shape[-1])
        if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype == torch.bool:
            return False  # no position is beyond the context that rotary embeddings are made for
        return func(*args, **(kwargs or {}))


def saved_bytes(
    model: PreTrainedModel, row: PackedBatch, compute: ComputeOptions, device: torch.device
) -> int:
    """Bytes kept for the backward pass of a row, rounded weights included, logits left out.

    Args:
        model: on the ``meta`` device; its tensors are replaced.
        row: of the update.
        compute: how it is computed. Where layers are computed again, what one of them keeps counts
            or the rounded weights, which are there before; that layers are compiled does not.
        device: where it is computed. Where one kernel attends to whole paths, what is gathered for
            it in the backward pass of a layer counts.

    Raises:
        RuntimeError: torch cannot tell a shape; where layers look at their numbers, it says so.
        ModelError: as ``flat_passes``.
    """
    dtype = torch.bfloat16 if compute.autocast else model.dtype
    config = model.config.get_text_config()
    flash = flash_fits(config, dtype, device)
    layouts = FlatLayouts(config, row, dtype, _CPU, flash)
    recurrence = recurrence_of(model, row, _CPU)
    compute = replace(compute, compile_layers=False)
    head = output_head(model).weight
    rounded = sum(p.nbytes for p in model.parameters()) // 2 if compute.autocast else 0
    with FakeTensorMode(allow_non_fake_inputs=True), _Answers():
        _put_on_cpu(model.eval())  # nothing is dropped
        kept = _count(model, row, compute, layouts, recurrence)
        if compute.checkpoint_layers:
            every = replace(compute, checkpoint_layers=False)
            whole = _count(model, row, every, layouts, recurrence)
            kept += max((whole - kept) // config.num_hidden_layers, rounded)
    kept += len(row.target_ids) * head.shape[1] * dtype.itemsize
    kept += head.numel() * dtype.itemsize if compute.autocast else 0
    layout = next(iter(layouts.all.values()))
    if isinstance(layout, StretchLayout):  # keys, values, their gradients, and these in float32
        gathered = len(layout.keys) * max(each.numbers for each in kv_layers(config)) // 2
        kept += gathered * (4 * dtype.itemsize + torch.float32.itemsize)
    return kept


def _put_on_cpu(model: PreTrainedModel) -> None:
    """As far as layers can tell; tensors that are the same stay so."""
    moved: dict[int, Tensor] = {}
    for module in model.modules():
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for name, tensor in own:
            if id(tensor) not in moved:
                there = torch.empty_like(tensor, device=_CPU)
                is_weight = isinstance(tensor, nn.Parameter)
                there = nn.Parameter(there, tensor.requires_grad) if is_weight else there
                moved[id(tensor)] = there
            setattr(module, name, moved[id(tensor)])


def _count(
    model: PreTrainedModel,
    row: PackedBatch,
    compute: ComputeOptions,
    layouts: FlatLayouts,
    recurrence: FlatRecurrence | None,
) -> int:
    """Bytes that a forward pass keeps, weights left out."""
    weights = {_memory_of(parameter) for parameter in model.parameters()}
    saved: list[ReferenceType[Tensor]] = []  # some are let go before the pass ends

    def keep(tensor: Tensor) -> Tensor:
        saved.append(ref(tensor))
        return tensor

    with (
        flat_passes(model, compute),
        torch.autocast("cpu", torch.bfloat16, enabled=compute.autocast),
        saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        try:
            output = language_model(model)(
                input_ids=to_device(row.token_ids, _CPU)[None],
                position_ids=to_device(row.position_ids, _CPU)[None],
                attention_mask=None,
                use_cache=False,
                flat_layouts=layouts,
                recurrence=recurrence,
            )
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise RuntimeError("what its layers compute depends on their numbers") from error
        kept = {_memory_of(each): each for one in saved if (each := one()) is not None}
        del output  # which held them
    return sum(kept[one].untyped_storage().nbytes() for one in kept.keys() - weights)


def _memory_of(tensor: Tensor) -> int:
    """What is the same for two views of the same memory; there may be no address."""
    return tensor.untyped_storage()._cdata
