"""What the keys and values of one token are made of, layer by layer.

Shapes: K key/value heads, D dimensions of a key, Dv of a value.
"""

from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from graphpo_agent.engines.local.layer_kinds import layer_kinds
from graphpo_agent.errors import ModelError

__all__ = ["KVLayer", "kv_layers", "widest_head"]


@dataclass(frozen=True, slots=True)
class KVLayer:
    """One attention layer's part of it.

    Example: ``KVLayer(num_heads=4, key_dim=16, value_dim=16)``.

    Attributes:
        num_heads: K.
        key_dim: D.
        value_dim: Dv; another than D where keys and values are unpacked from one vector (DeepSeek).
    """

    num_heads: int
    key_dim: int
    value_dim: int

    @property
    def parts(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """(K, D) and (K, Dv)."""
        return (self.num_heads, self.key_dim), (self.num_heads, self.value_dim)

    @property
    def numbers(self) -> int:
        """K (D + Dv)."""
        return self.num_heads * (self.key_dim + self.value_dim)


def kv_layers(config: PretrainedConfig) -> list[KVLayer]:
    """Those of a language model that have keys and values of their own, as its config names them.

    Linear attention layers have none, and the last ``num_kv_shared_layers`` (Gemma 3n and 4) use
    those of earlier ones. What ``per_layer_config`` says of a layer counts before what is said of
    all: Gemma 4's full attention in newer transformers.

    Raises:
        ModelError: there are none.
    """
    values = config.to_dict()
    kinds = layer_kinds(config)
    kinds = kinds[: len(kinds) - (values.get("num_kv_shared_layers") or 0)]
    layers = [(i, kind) for i, kind in enumerate(kinds) if kind != "linear_attention"]
    if not layers or not hasattr(config, "num_attention_heads"):
        raise ModelError(
            f"model {config.name_or_path} ({config.model_type}) has no attention layers; use one "
            "with plain attention in every layer or in some"
        )
    own = values.get("per_layer_config") or {}
    return [_layer(config, values | own.get(str(i), {}), kind) for i, kind in layers]


def widest_head(config: PretrainedConfig) -> int:
    """Dimensions of the longest query, key or value of any layer."""
    return max(max(layer.key_dim, layer.value_dim) for layer in kv_layers(config))


def _layer(config: PretrainedConfig, values: dict[str, Any], kind: str) -> KVLayer:
    heads = values.get("num_key_value_heads") or config.num_attention_heads
    dim = values.get("head_dim") or config.hidden_size // config.num_attention_heads
    if values.get("kv_lora_rank"):  # unpacked for every query head
        key_dim = values["qk_nope_head_dim"] + values["qk_rope_head_dim"]
        return KVLayer(config.num_attention_heads, key_dim, values["v_head_dim"])
    if kind == "full_attention" and values.get("global_head_dim"):
        dim = values["global_head_dim"]
        if values.get("attention_k_eq_v"):
            heads = values.get("num_global_key_value_heads") or heads
    return KVLayer(heads, dim, dim)
