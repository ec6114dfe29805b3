"""Falcon-H1's blocks in turn, each handed all that the model's call was given.

Attention and Mamba-2 (``mamba.py``) stand side by side in every block, and their outputs are added
up. transformers 5.10 keeps what its attention interface needs from reaching the blocks; so we call
them.

Shapes: N tokens of a row.
"""

from typing import Any

from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.modeling_outputs import BaseModelOutputWithPast

__all__ = ["over_row", "stacks"]


def stacks(model: nn.Module, config: PretrainedConfig) -> list[Any]:
    """The parts of a model that call blocks of this family; none in a model of another one."""
    if config.model_type != "falcon_h1":
        return []
    return [part for part in model.modules() if hasattr(part, "embed_tokens")]


def over_row(
    stack: Any, input_ids: Tensor, position_ids: Tensor, **handed: Any
) -> BaseModelOutputWithPast:
    """Hidden states of a row.

    Args:
        stack: one of ``stacks``.
        input_ids: [1, N].
        position_ids: [1, N].
        **handed: goes to the blocks.
    """
    hidden = stack.embed_tokens(input_ids) * stack.embedding_multiplier
    turns = stack.rotary_emb(hidden, position_ids=position_ids)
    handed |= {"position_ids": position_ids, "position_embeddings": turns}
    for block in stack.layers:
        (hidden,) = block(hidden, **handed)
    return BaseModelOutputWithPast(last_hidden_state=stack.final_layernorm(hidden))
