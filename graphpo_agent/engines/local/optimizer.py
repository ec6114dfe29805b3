"""AdamW: its parameter groups, one step, and where its state waits between updates."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW

from graphpo_agent.engines.local.options import OptimizerOptions
from graphpo_agent.errors import ModelError

__all__ = ["make_adamw", "optimizer_step", "state_on_device"]


def make_adamw(model: nn.Module, options: OptimizerOptions) -> AdamW:
    """AdamW of the weights that are trained, with weight decay on matrices only.

    The fused kernel makes one pass over memory, on a CPU as on a GPU.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": options.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return AdamW(groups, betas=options.betas, fused=True)


def optimizer_step(optimizer: AdamW, learning_rate: float, max_grad_norm: float) -> float:
    """Scale the gradients down to ``max_grad_norm``, step, and clear them.

    Returns:
        The gradients' norm before they were scaled.

    Raises:
        ModelError: the norm is not finite; the weights stay as they are.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if all(p.grad is None for p in parameters):  # no token had a gradient; the moments still decay
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
    norm = float(clip_grad_norm_(parameters, max_grad_norm))
    if not math.isfinite(norm):
        raise ModelError(
            f"the norm of the gradient is {norm}: the policy has diverged; lower the learning rate"
        )
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


@contextmanager
def state_on_device(optimizer: AdamW, offload: bool) -> Iterator[None]:
    """With ``offload``, the state is beside the weights only inside the ``with`` block.

    Outside it waits in the CPU's memory, pinned; the numbers do not change. Weights that are on
    the CPU keep their state where it is.
    """
    if not offload:
        yield
        return
    _move(optimizer, to_cpu=False)
    try:
        yield
    finally:
        _move(optimizer, to_cpu=True)


def _move(optimizer: AdamW, to_cpu: bool) -> None:
    for parameter, state in optimizer.state.items():
        if parameter.device.type == "cpu":
            continue
        for name, value in state.items():
            state[name] = _pinned(value) if to_cpu else value.to(parameter.device)


def _pinned(value: Tensor) -> Tensor:
    """A copy in the CPU's memory; pinned, it travels faster."""
    return value.to("cpu").pin_memory() if torch.cuda.is_available() else value.to("cpu")
