"""What a sampler keeps of a model's tokens and paths, found by computing one token."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from graphpo_agent.engines.local.attention import attention
from graphpo_agent.engines.local.cache import KVShape
from graphpo_agent.engines.local.kv_layers import KVLayer
from graphpo_agent.engines.local.language_model import language_model
from graphpo_agent.engines.local.model import computable
from graphpo_agent.engines.local.scoring import Scoring
from graphpo_agent.engines.local.state_pool import StateShape

__all__ = ["kv_shape", "state_shape"]


def kv_shape(model: PreTrainedModel) -> KVShape:
    """What a token's keys and values are made of.

    Raises:
        ModelError: the model cannot be computed in the precision of its weights.
    """
    return _seen(model)[0].shape()


def state_shape(model: PreTrainedModel) -> StateShape | None:
    """What a path's state is made of in the model's linear layers; None: it has none.

    Raises:
        ModelError: the model cannot be computed in the precision of its weights.
    """
    return _seen(model)[1].shape()


@torch.inference_mode()
def _seen(model: PreTrainedModel) -> tuple["_Keys", "_States"]:
    token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    keys, states = _Keys(), _States()
    with attention(model, "graphpo_cached"), computable(model):
        language_model(model)(
            input_ids=token,
            position_ids=token,
            attention_mask=None,
            use_cache=False,
            cached_pass=keys,
            recurrence=states,
        )
    return keys, states


class _Keys:
    """Sees what one token's keys and values look like in every layer."""

    def __init__(self) -> None:
        self._layers: list[KVLayer] = []
        self._values: list[Tensor] = []
        self._source: list[int] = []

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        shared = [i for i, own in enumerate(self._values) if own is value]
        self._source.append(shared[0] if shared else len(self._layers))
        if not shared:
            self._layers.append(KVLayer(key.shape[1], key.shape[3], value.shape[3]))
            self._values.append(value)
        attended = query.new_zeros(*query.shape[:3], value.shape[3])
        return attended.to(value.dtype).transpose(1, 2)

    def shape(self) -> KVShape:
        value = self._values[0]
        return KVShape(tuple(self._layers), tuple(self._source), value.dtype, value.device)


class _States:
    """Sees what linear layers keep of a path; those of one model are alike."""

    def __init__(self) -> None:
        self._inputs = torch.empty(0)
        self._width = self._layers = 0
        self._memory, self._memory_dtype = (0, 0, 0), torch.float32

    def convolve(self, inputs: Tensor, weight: Tensor) -> Tensor:
        self._inputs, self._width = inputs, weight.shape[1]
        self._layers += 1
        return inputs

    def recall(
        self, query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor | None
    ) -> Tensor:
        self._memory = key.shape[1], key.shape[2], value.shape[2]
        self._memory_dtype = value.dtype
        return value

    def shape(self) -> StateShape | None:
        if not self._layers:
            return None
        return StateShape(
            self._layers,
            (self._width - 1, self._inputs.shape[1]),
            self._inputs.dtype,
            self._memory,
            self._memory_dtype,
            self._inputs.device,
        )
