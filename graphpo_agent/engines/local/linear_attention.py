"""Layers without keys and values over a flat row: delta nets, Mamba-2, short convolutions.

Such a layer mixes a token with the few before it in a short convolution, and most read from a state
that its path has written (``delta_rule.py``). Neither goes through transformers' attention
interface, and the functions behind it differ from version to version; so the layers' arithmetic is
ours (``delta_nets.py``, ``mamba.py``, ``short_convolutions.py``), on their own weights, which keep
their names. What comes before a token on its path is the ``Recurrence``'s affair.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from graphpo_agent.engines.local import delta_nets, falcon_h1, mamba, short_convolutions
from graphpo_agent.engines.local.handed_on import handed_on
from graphpo_agent.engines.local.layer_kinds import layer_kinds
from graphpo_agent.engines.local.recurrence import Recurrence, RecurrentSizes

__all__ = ["conv_width", "over_recurrence", "state_bytes"]

_KINDS = (delta_nets, mamba, short_convolutions)


def conv_width(config: PretrainedConfig) -> int:
    """Tokens that the convolutions of a model's linear layers span.

    0 where it is of no family that has such layers.
    """
    sizes = _sizes(config)
    return 0 if sizes is None else sizes.width


def state_bytes(config: PretrainedConfig, itemsize: int) -> int:
    """What the linear layers keep of one path, whose products have ``itemsize`` bytes."""
    sizes, count = _sizes(config), layer_kinds(config).count("linear_attention")
    if sizes is None:
        return 0
    precise = max(itemsize, torch.float32.itemsize)
    inputs = (sizes.width - 1) * sizes.channels
    return count * (inputs * itemsize + sizes.heads * sizes.key_dim * sizes.value_dim * precise)


@contextmanager
def over_recurrence(model: PreTrainedModel) -> Iterator[None]:
    """Inside the ``with`` block linear layers compute a flat row behind its ``Recurrence``.

    It reaches them as the keyword argument ``recurrence`` of the model's call, which not every
    family's blocks hand on; so it is taken from the block's call.
    """
    config = model.config.get_text_config()
    kinds = [kind for kind in _KINDS if kind.sizes(config) is not None]
    own = [(*pair, kind) for kind in kinds for pair in _mixers(model, kind.is_mixer)]
    stacks = falcon_h1.stacks(model, config)
    for block, mixer, kind in own:
        block.forward = partial(_handing_on, block, mixer, kind.over_row)
    for stack in stacks:
        stack.forward = partial(falcon_h1.over_row, stack)
    try:
        yield
    finally:
        for stack in stacks:
            del stack.forward
        for block, mixer, _ in own:
            del block.forward
            vars(mixer).pop("forward", None)


def _mixers(model: nn.Module, is_mixer: Callable[[nn.Module], bool]) -> list[tuple[Any, nn.Module]]:
    """The layers of one kind, each behind the block that calls it."""
    return [
        (block, part) for block in model.modules() for part in block.children() if is_mixer(part)
    ]


@torch.compiler.disable(recursive=False)
def _handing_on(
    block: Any,
    mixer: Any,
    over_row: Callable[..., Tensor],
    *given: Any,
    recurrence: Recurrence | None = None,
    **named: Any,
) -> Any:
    mixer.forward = partial(over_row, mixer, handed_on(recurrence))
    return type(block).forward(block, *given, **named)


def _sizes(config: PretrainedConfig) -> RecurrentSizes | None:
    found = (kind.sizes(config) for kind in _KINDS)
    return next((sizes for sizes in found if sizes is not None), None)
