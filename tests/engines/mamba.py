"""Mamba-2 token by token, in the precision of the weights: an oracle."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1Mixer, FalconH1RMSNorm
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import (
    GraniteMoeHybridMambaLayer,
    GraniteMoeHybridRMSNorm,
    GraniteMoeHybridRMSNormGated,
)
from transformers.models.nemotron_h import modeling_nemotron_h
from transformers.models.nemotron_h.modeling_nemotron_h import (
    NemotronHForCausalLM,
    NemotronHMamba2Mixer,
    NemotronHRMSNorm,
)
from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

from tests.engines.delta_nets import slow_delta_rule
from tests.engines.norms import norm_in_full_precision


def use_slow_mamba(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models' own layers and norms cast to float32, as one casts its logits."""
    monkeypatch.setattr(NemotronHForCausalLM, "forward", _forward)
    for layer in (GraniteMoeHybridMambaLayer, NemotronHMamba2Mixer, FalconH1Mixer):
        monkeypatch.setattr(layer, "forward", _slow_layer)
    for norm in (GraniteMoeHybridRMSNorm, NemotronHRMSNorm, FalconH1RMSNorm):
        monkeypatch.setattr(norm, "forward", norm_in_full_precision)
    of_nemotron = getattr(modeling_nemotron_h, "NemotronHRMSNormGated", Zamba2RMSNormGated)
    for norm in (GraniteMoeHybridRMSNormGated, of_nemotron):
        monkeypatch.setattr(norm, "forward", _gated_norm)


def _slow_layer(layer, hidden_states, **_):
    """[B, L, d] of whole sequences."""
    length = hidden_states.shape[1]
    widths = [layer.intermediate_size, layer.conv_dim, layer.num_heads]
    before, behind = getattr(layer, "ssm_in_multiplier", 1.0), getattr(layer, "mup_vector", 1.0)
    projected = layer.in_proj(hidden_states * before) * behind
    gate, mixed, step = projected.split(widths, dim=2)
    mixed = F.silu(layer.conv1d(mixed.mT)[:, :, :length]).mT
    of_groups = layer.n_groups * layer.ssm_state_size
    x, b, c = mixed.split([layer.intermediate_size, of_groups, of_groups], dim=2)
    x = x.unflatten(2, (layer.num_heads, -1))
    each = layer.num_heads // layer.n_groups
    b, c = (y.unflatten(2, (layer.n_groups, -1)).repeat_interleave(each, dim=2) for y in (b, c))
    step = F.softplus(step + layer.dt_bias)
    parts = (c, b, step[..., None] * x, -layer.A_log.exp() * step)
    nothing = x.new_zeros(len(x), layer.num_heads, layer.ssm_state_size, x.shape[3])
    read, _ = slow_delta_rule(*(part.transpose(1, 2) for part in parts), None, nothing)
    read = read.transpose(1, 2) + layer.D[:, None] * x
    read = read.flatten(2)
    has_norm = getattr(layer, "mamba_rms_norm", True)
    return layer.out_proj(layer.norm(read, gate) if has_norm else read * F.silu(gate))


def _forward(model, input_ids, **given):
    hidden = model.model(input_ids, **given).last_hidden_state
    return SimpleNamespace(logits=model.lm_head(hidden))


def _gated_norm(norm, hidden, gate):
    size = getattr(norm, "group_size", hidden.shape[-1])
    groups = (hidden * F.silu(gate)).unflatten(-1, (-1, size))
    scale = torch.rsqrt(groups.square().mean(-1, keepdim=True) + norm.variance_epsilon)
    return norm.weight * (groups * scale).flatten(-2)
