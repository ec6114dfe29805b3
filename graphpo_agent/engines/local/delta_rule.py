"""The gated delta rule, by which a linear attention layer learns and recalls within a context.

A head's state S maps keys to values. A token forgets some of it, writes, and reads::

    S_t = exp(g_t) S_{t-1} + k_t u_t^T        u_t = beta_t (v_t - exp(g_t) S_{t-1}^T k_t)
    o_t = S_t^T q_t

(Gated Delta Networks, Yang et al. 2025, eq. 10.) Within a chunk of tokens the u are the solution
of one triangular system, so that the products are those of matrices. Without a beta the u are the
values, as in Mamba-2.

Shapes: B sequences, H heads, L tokens, C of them in a chunk, K key dimension, V value dimension.
"""

import torch
from torch import Tensor

__all__ = ["gated_delta_rule"]

_CHUNK = 64
"""Tokens of a chunk; more multiply more that is masked, fewer are more steps one after another."""


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor | None,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    """What every token reads, and the state behind the last.

    Args:
        query: [B, H, L, K].
        key: [B, H, L, K].
        value: [B, H, L, V].
        log_decay: [B, H, L] g, at most 0.
        beta: [B, H, L] in [0, 2], or None. A token with a key (or a beta) and a log decay of 0
            changes nothing.
        state: [B, H, K, V] before the first token.

    Returns:
        [B, H, L, V] and [B, H, K, V].
    """
    beta = None if beta is None else beta[..., None]
    if query.shape[2] == 1:
        return _token(query, key, value, log_decay[..., None], beta, state)
    outputs: list[Tensor] = []
    for start in range(0, query.shape[2], _CHUNK):
        own = slice(start, start + _CHUNK)
        q, k, v, g = (x[:, :, own] for x in (query, key, value, log_decay))
        b = None if beta is None else beta[:, :, own]
        out, state = _chunk(q, k, v, g, b, state)
        outputs.append(out)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2), state


def _token(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor | None,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    """As ``gated_delta_rule``, for one token; ``log_decay`` and ``beta`` are [B, H, 1, 1]."""
    state = log_decay.exp() * state
    new = value if beta is None else beta * (value - key @ state)
    state = torch.addcmul(state, key.mT, new)
    return query @ state, state


def _chunk(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor | None,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    """As ``gated_delta_rule``, for C tokens; ``beta`` is [B, H, C, 1]."""
    since_start = log_decay.cumsum(-1)
    between = since_start[..., :, None] - since_start[..., None, :]
    later = torch.ones_like(between[0, 0], dtype=torch.bool).triu(1)
    decay = between.masked_fill(later, -torch.inf).exp()
    from_start = since_start.exp()[..., None]
    new = value
    if beta is not None:
        # What the state holds for a key is subtracted before what the tokens of the chunk add.
        new = beta * (value - from_start * (key @ state))
        system = beta * decay * (key @ key.mT)  # its diagonal is not read: it counts as ones
        new = torch.linalg.solve_triangular(system, new, upper=False, unitriangular=True)
    out = from_start * (query @ state) + (decay * (query @ key.mT)) @ new
    to_end = (since_start[..., -1:] - since_start).exp()[..., None]
    state = from_start[..., -1:, :] * state + (to_end * key).mT @ new
    return out, state
