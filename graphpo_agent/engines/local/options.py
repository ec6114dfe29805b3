"""What the local engine can be told, as plain values."""

from dataclasses import dataclass, field
from typing import Literal

from graphpo_agent.engines.local.loss import Objective
from graphpo_agent.engines.local.token_weights import LossAggregation

__all__ = ["ComputeOptions", "ImitationOptions", "OptimizerOptions", "UpdateOptions"]


@dataclass(frozen=True, slots=True)
class ComputeOptions:
    """How forward and backward passes over flat rows are computed; what they compute stays.

    Example: ``ComputeOptions(autocast=True, checkpoint_layers=True)``.

    Attributes:
        autocast: products of float32 matrices in bfloat16; log-softmax and loss stay float32.
        checkpoint_layers: keep only the inputs of each layer for the backward pass and compute
            the rest again.
        compile_layers: fuse the small operations of each layer with torch.compile.
    """

    autocast: bool = False
    checkpoint_layers: bool = False
    compile_layers: bool = False


@dataclass(frozen=True, slots=True)
class OptimizerOptions:
    """What every optimiser step has in common.

    Example: ``OptimizerOptions(weight_decay=0.01, max_tokens=4096)``.

    Attributes:
        betas: AdamW's.
        weight_decay: AdamW's, on matrices only.
        max_grad_norm: gradients are scaled down to this norm.
        max_tokens: tokens of one flat row; a larger graph is cut into several.
        offload: the optimiser's state waits in the CPU's memory between updates.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    max_tokens: int = 4096
    offload: bool = False


@dataclass(frozen=True, slots=True)
class UpdateOptions:
    """How one ``update`` learns.

    Example: ``UpdateOptions(learning_rate=3e-4, minibatch_graphs=4, seed=7)``.

    Attributes:
        learning_rate: after the warm-up.
        warmup_steps: optimiser steps over which it rises linearly.
        minibatch_graphs: graphs per optimiser step, about (``engines/minibatches.py``).
        epochs: passes over the batch.
        objective: clipping, KL and entropy.
        loss_aggregation: how token losses become one number; ``edge_mean`` is the paper's.
        horizon: what ``sequence_sum`` divides by: the longest response.
        old_logprobs: ``recompute`` them once before the first minibatch, or take those recorded
            in the ``rollout``.
        mismatch_cap: the largest of the weights that make up for a sampler whose probabilities
            are not those recomputed (``loss.mismatch_weights``); None: all weigh 1.
        temperature: that of sampling, > 0.
        seed: of the minibatches' order, together with the step.
    """

    learning_rate: float = 1e-6
    warmup_steps: int = 0
    minibatch_graphs: int = 16
    epochs: int = 1
    objective: Objective = field(default_factory=Objective)
    loss_aggregation: LossAggregation = "edge_mean"
    horizon: int = 1
    old_logprobs: Literal["recompute", "rollout"] = "recompute"
    mismatch_cap: float | None = None
    temperature: float = 1.0
    seed: int = 0

    def rate(self, step: int) -> float:
        """The learning rate of optimiser step 0, 1, …."""
        return self.learning_rate * min(1.0, (step + 1) / max(1, self.warmup_steps))


@dataclass(frozen=True, slots=True)
class ImitationOptions:
    """The learning rate of ``imitate``: linear warm-up, then linear decay to 0.

    Example: ``ImitationOptions(4e-3, total_steps=600, warmup_steps=30)``.

    Attributes:
        learning_rate: the highest.
        total_steps: after that many steps, warm-up included, the rate is 0.
        warmup_steps: over how many steps the rate rises.
    """

    learning_rate: float
    total_steps: int
    warmup_steps: int = 0

    def rate(self, step: int) -> float:
        """The learning rate of step 0, 1, …."""
        rising = (step + 1) / max(1, self.warmup_steps)
        falling = (self.total_steps - step) / max(1, self.total_steps - self.warmup_steps)
        return self.learning_rate * max(0.0, min(1.0, rising, falling))
