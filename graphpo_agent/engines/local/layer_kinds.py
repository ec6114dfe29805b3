"""What a model's layers are, in the words of transformers' newer configurations."""

from itertools import chain

from transformers import PretrainedConfig

__all__ = ["layer_kinds"]

_OTHER_WORDS = {
    "attention": ["full_attention"],
    "mamba": ["linear_attention"],
    "conv": ["linear_attention"],
    "hybrid": ["full_attention", "linear_attention"],
}
_ONE_OF_TWO = ("mlp", "moe")
"""Nemotron-H counts what follows an attention layer as a layer of its own."""


def layer_kinds(config: PretrainedConfig) -> list[str]:
    """``full_attention``, ``sliding_attention``, ``linear_attention``, or what else it names.

    One for each layer that mixes tokens; ``full_attention`` where a configuration does not say.
    """
    given = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    if not given:
        return ["full_attention"] * config.num_hidden_layers
    own = (_OTHER_WORDS.get(kind, [str(kind)]) for kind in given if kind not in _ONE_OF_TWO)
    return list(chain.from_iterable(own))
