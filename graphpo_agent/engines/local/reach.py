"""How far a model's contexts reach, and its layers within them."""

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from graphpo_agent.engines.local.layer_kinds import layer_kinds
from graphpo_agent.engines.local.linear_attention import conv_width
from graphpo_agent.errors import ConfigError, ModelError

__all__ = [
    "check_context",
    "context_limit",
    "layer_windows",
    "longest_context",
    "position_limit",
    "told_reach",
]

_SHORTER = "the original context of its LongRoPE goes no further"


def context_limit(config: PretrainedConfig) -> int:
    """The longest context, in tokens, that a model is made for and the flat layout can express.

    Raises:
        ModelError: the config states no maximum, or has layers that the flat layout cannot express.
    """
    limit = position_limit(config)
    if not hasattr(config, "max_position_embeddings"):
        raise ModelError(
            f"model {config.name_or_path}: config.json has no max_position_embeddings; add it"
        )
    most = int(config.max_position_embeddings)
    return most if limit is None else min(most, limit)


def told_reach(config: PretrainedConfig, reach: int) -> list[str]:
    """A line where contexts end at ``reach`` tokens, unlike model and user say; else none."""
    stated = int(config.max_position_embeddings)
    if reach == stated or reach < context_limit(config):
        return []
    return [
        f"contexts end at {reach:,} tokens, not at the {stated:,} that the model states: {_SHORTER}"
    ]


def check_context(wanted: int, limit: int, config: PretrainedConfig) -> None:
    """Raise ConfigError where ``engine.max_context_tokens`` is more than a model's limit."""
    if wanted <= limit:
        return
    stated = int(config.max_position_embeddings)
    why = f" of the {stated} that it states: {_SHORTER}" if limit < stated else ""
    raise ConfigError(
        f"engine.max_context_tokens is {wanted}, but {config.name_or_path} holds {limit} "
        f"tokens{why}"
    )


def longest_context(config: PretrainedConfig, wanted: int | None) -> int:
    """``engine.max_context_tokens``, where that is wanted, or as long as a model's contexts can be.

    Raises:
        ConfigError: that is more than the model holds.
        ModelError: as ``context_limit``.
    """
    limit = context_limit(config)
    if wanted is None:
        return limit
    check_context(wanted, limit, config)
    return wanted


def layer_windows(config: PretrainedConfig) -> frozenset[int | None]:
    """The sliding windows of a model's layers; None is that of a layer without one.

    A layer with a window of w tokens attends to a token and to the w - 1 before it.
    """
    values = config.to_dict()
    window = values.get("sliding_window") or None  # 0, as Qwen2-MoE has it, is none
    kinds = values.get("layer_types") or ["sliding_attention"]
    return frozenset(window if kind == "sliding_attention" else None for kind in kinds)


def position_limit(config: PretrainedConfig) -> int | None:
    """The longest context, in tokens, whose positions mean the same whatever else is computed.

    LongRoPE turns all positions of a pass another way as soon as one of them is beyond the original
    context: that is its limit. None: there is none.

    Raises:
        ModelError: the config has layers that are neither attention nor of a kind that
            ``linear_attention.py`` computes, or that pick some of the earlier tokens
            (``index_topk``, as GLM-5).
    """
    values = config.to_dict()
    kinds = set(layer_kinds(config)) - {"full_attention", "sliding_attention"}
    if conv_width(config):
        kinds.discard("linear_attention")
    if values.get("index_topk"):  # whatever a version of transformers calls such layers
        kinds.add("indexed_attention")
    if kinds:
        raise ModelError(
            f"model {config.name_or_path}: layers of kind {', '.join(sorted(kinds))} are not "
            "supported; use a model whose layers are attention, gated delta nets, Mamba-2 or short "
            "convolutions"
        )
    return min(_long_rope_limits(values), default=None)


def _long_rope_limits(values: Mapping[str, Any]) -> list[int]:
    """The original context of each LongRoPE of a config; there may be one per kind of layer."""
    own = values.get("rope_parameters") or {}
    kinds = [own, *(kind for kind in own.values() if isinstance(kind, dict))]
    return [
        int(kind["original_max_position_embeddings"])
        for kind in kinds
        if kind.get("rope_type") == "longrope"
    ]
