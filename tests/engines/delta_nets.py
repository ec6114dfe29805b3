"""Gated delta nets token by token, in the precision of their weights: an oracle."""

import pytest
import torch
import torch.nn.functional as F
from transformers.models.olmo_hybrid.modeling_olmo_hybrid import (
    OlmoHybridGatedDeltaNet,
    OlmoHybridRMSNorm,
    OlmoHybridRMSNormGated,
)
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5GatedDeltaNet,
    Qwen3_5RMSNorm,
    Qwen3_5RMSNormGated,
)
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextGatedDeltaNet,
    Qwen3NextRMSNorm,
    Qwen3NextRMSNormGated,
)

from tests.engines.norms import gemma_norm_in_full_precision, norm_in_full_precision


def use_slow_delta_nets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models' own layers and norms cast to float32."""
    for layer in (Qwen3_5GatedDeltaNet, Qwen3NextGatedDeltaNet):
        monkeypatch.setattr(layer, "forward", _slow_layer)
    for norm in (Qwen3_5RMSNorm, Qwen3NextRMSNorm):
        monkeypatch.setattr(norm, "forward", gemma_norm_in_full_precision)
    monkeypatch.setattr(OlmoHybridGatedDeltaNet, "forward", _slow_olmo_layer)
    monkeypatch.setattr(OlmoHybridRMSNorm, "forward", norm_in_full_precision)
    for norm in (Qwen3_5RMSNormGated, Qwen3NextRMSNormGated, OlmoHybridRMSNormGated):
        monkeypatch.setattr(norm, "forward", _gated_norm)


def slow_delta_rule(query, key, value, log_decay, beta, state):
    """As ``gated_delta_rule``, written down as the recurrence is."""
    outputs = []
    for t in range(query.shape[2]):
        state = log_decay[:, :, t, None, None].exp() * state
        change = value[:, :, t]
        if beta is not None:
            known = torch.einsum("bhkv,bhk->bhv", state, key[:, :, t])
            change = beta[:, :, t, None] * (change - known)
        state = state + torch.einsum("bhk,bhv->bhkv", key[:, :, t], change)
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, query[:, :, t]))
    return torch.stack(outputs, dim=2), state


def _slow_layer(layer, hidden_states, **_):
    """[B, L, d] of whole sequences."""
    if hasattr(layer, "in_proj_qkvz"):
        *mixed, gate, b, a = layer.fix_query_key_value_ordering(
            layer.in_proj_qkvz(hidden_states), layer.in_proj_ba(hidden_states)
        )
        mixed = torch.cat([x.flatten(2) for x in mixed], dim=2)
    else:
        parts = (layer.in_proj_qkv, layer.in_proj_z, layer.in_proj_b, layer.in_proj_a)
        mixed, gate, b, a = (part(hidden_states) for part in parts)
    mixed = F.silu(layer.conv1d(mixed.mT)[:, :, : mixed.shape[1]]).mT
    parts = mixed.split([layer.key_dim, layer.key_dim, layer.value_dim], dim=2)
    read = _read(layer, *parts, a, b.sigmoid())
    gate = gate.reshape(read.shape)
    return layer.out_proj(layer.norm(read, gate).flatten(2))


def _slow_olmo_layer(layer, hidden_states, **_):
    """[B, L, d] of whole sequences."""
    mixed = [part(hidden_states).mT for part in (layer.q_proj, layer.k_proj, layer.v_proj)]
    if hasattr(layer, "conv1d"):  # newer versions of transformers have one for all
        weights = layer.conv1d.weight.split([part.shape[1] for part in mixed])
    else:
        weights = [part.weight for part in (layer.q_conv1d, layer.k_conv1d, layer.v_conv1d)]
    query, key, value = (
        F.silu(F.conv1d(F.pad(part, (weight.shape[2] - 1, 0)), weight, groups=len(weight))).mT
        for part, weight in zip(mixed, weights, strict=True)
    )
    beta = 2 * layer.b_proj(hidden_states).sigmoid()
    read = _read(layer, query, key, value, layer.a_proj(hidden_states), beta)
    gate = layer.g_proj(hidden_states).view(read.shape)
    return layer.o_proj(layer.o_norm(read, gate).flatten(2))


def _read(layer, query, key, value, a, beta):
    """[B, L, H, V] of [B, L, J K] twice, [B, L, H V] and [B, L, H] twice."""
    heads = layer.num_v_heads
    query, key = (
        x.unflatten(2, (layer.num_k_heads, layer.head_k_dim))
        .repeat_interleave(heads // layer.num_k_heads, dim=2)
        .transpose(1, 2)
        for x in (query, key)
    )
    query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
    value = value.unflatten(2, (heads, layer.head_v_dim)).transpose(1, 2)
    log_decay = (-layer.A_log.exp() * F.softplus(a + layer.dt_bias)).transpose(1, 2)
    nothing = value.new_zeros(len(value), heads, layer.head_k_dim, layer.head_v_dim)
    query = query / layer.head_k_dim**0.5
    read, _ = slow_delta_rule(query, key, value, log_decay, beta.transpose(1, 2), nothing)
    return read.transpose(1, 2)


def _gated_norm(norm, hidden, gate):
    scale = torch.rsqrt(hidden.square().mean(-1, keepdim=True) + norm.variance_epsilon)
    return norm.weight * hidden * scale * F.silu(gate)
