"""Layers without keys and values over a flat row: gated delta nets and Mamba-2.

Such a layer mixes a token with the few before it in a short convolution, and reads from a state
that its path has written (``delta_rule.py``). Neither goes through transformers' attention
interface, and the functions behind it differ from version to version; so the layers' arithmetic is
ours (``delta_nets.py``, ``mamba.py``), on their own weights, which keep their names. What comes
before a token on its path is the ``Recurrence``'s affair.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from transformers import PretrainedConfig, PreTrainedModel

from graphpo_agent.engines.local import delta_nets, mamba
from graphpo_agent.engines.local.layer_kinds import layer_kinds
from graphpo_agent.engines.local.recurrence import RecurrentSizes

__all__ = ["conv_width", "over_recurrence", "state_bytes"]


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

    It reaches them as the keyword argument ``recurrence`` of the model's call.
    """
    config = model.config.get_text_config()
    kinds = [kind for kind in (delta_nets, mamba) if kind.sizes(config) is not None]
    own = [(layer, kind.over_row) for kind in kinds for layer in kind.layers(model)]
    for layer, over_row in own:
        layer.forward = partial(over_row, layer)
    try:
        yield
    finally:
        for layer, _ in own:
            del layer.forward


def _sizes(config: PretrainedConfig) -> RecurrentSizes | None:
    return delta_nets.sizes(config) or mamba.sizes(config)
