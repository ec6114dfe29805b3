"""A model's weights as checkpoints have them, by name and in shape.

transformers keeps some in another shape, such as all experts of a layer together, and under other
names. What loads checkpoints, as vLLM does, knows those of the checkpoint.
"""

import re
from collections.abc import Callable, Iterator
from itertools import groupby

from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from graphpo_agent.engines.local.lora import has_adapters, merged_weights

__all__ = ["weights_as_saved"]

_LAYER = re.compile(r".*?\.\d+\.")


def weights_as_saved(
    model: PreTrainedModel, whole: Callable[[Tensor], Tensor] = lambda weight: weight
) -> Iterator[tuple[str, Tensor]]:
    """The weights of a model with its adapters merged, those of one layer after the other.

    Example: ``model.layers.0.mlp.experts.down_proj`` of four experts of Mixtral becomes
    ``model.layers.0.block_sparse_moe.experts.0.w2.weight`` and three more.

    Args:
        model: some of its weights may be shards.
        whole: makes a whole weight of a shard; it is asked for all weights, in their order.
    """
    weights = merged_weights(model) if has_adapters(model) else model.state_dict().items()
    gathered = ((name, whole(weight)) for name, weight in weights)
    if getattr(model, "_weight_conversions", None) == []:  # as in the checkpoint that was loaded
        yield from gathered
        return
    for _, layer in groupby(gathered, key=lambda named: _layer(named[0])):
        yield from revert_weight_conversion(model, dict(layer)).items()


def _layer(name: str) -> str:
    """What the names of a layer's weights begin with."""
    found = _LAYER.match(name)
    return name if found is None else found.group()
