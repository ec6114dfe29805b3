"""The objective in verl's workers: verl's clipped loss over weighted advantages, and our terms.

Imported by verl's processes only. Shapes: B rows, T response tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla
from verl.utils.metric import AggregationType, Metric
from verl.workers.config import ActorConfig
from verl.workers.utils.padding import no_padding_2_padding

from graphpo_agent.engines.local.loss import reverse_kl

__all__ = ["LossTerms", "graph_loss", "graph_objective"]

_clipped_loss: Any = compute_policy_loss_vanilla


@dataclass(frozen=True, slots=True)
class LossTerms:
    """What the objective is made of beside the clipping, which verl's configuration holds.

    Attributes:
        advantages: the fields of the advantage terms, each clipped apart.
        kl: weight of the divergence from the reference model.
        entropy: weight of the entropy bonus.
    """

    advantages: tuple[str, ...]
    kl: float = 0.0
    entropy: float = 0.0


def graph_loss(
    config: ActorConfig,
    terms: LossTerms,
    model_output: Mapping[str, Any],
    data: TensorDict,
    dp_group: object = None,
) -> tuple[Tensor, dict[str, Metric]]:
    """A loss function for verl's training engine (``set_loss_fn``).

    Args:
        config: verl's of the actor.
        terms: ours.
        model_output: log-probabilities, and entropies where they are asked for.
        data: a micro-batch.
        dp_group: unused; the sum over ranks is verl's.
    """
    del dp_group
    logprobs = no_padding_2_padding(model_output["log_probs"], data)
    entropies = None
    if terms.entropy:
        entropies = no_padding_2_padding(model_output["entropy"], data)
    fields = ["response_mask", "old_log_probs", "token_weights", *terms.advantages]
    if terms.kl:
        fields.append("ref_log_prob")
    ranks = int(data["dp_size"])
    padded = data.select(*fields).to_padded_tensor()
    return graph_objective(config, terms, logprobs, entropies, padded, ranks)


def graph_objective(
    config: ActorConfig,
    terms: LossTerms,
    logprobs: Tensor,
    entropies: Tensor | None,
    fields: Mapping[str, Tensor],
    ranks: int,
) -> tuple[Tensor, dict[str, Metric]]:
    """The loss of a micro-batch, a sum over its tokens.

    Args:
        config: verl's of the actor.
        terms: ours.
        logprobs: [B, T] under the policy; carries the gradient.
        entropies: [B, T], with an entropy term.
        fields: [B, T] ``response_mask``, ``old_log_probs``, ``token_weights``, the advantages
            (times the weights) and, with a KL term, ``ref_log_prob``.
        ranks: processes whose gradients are averaged; the loss is multiplied by them.
    """
    config.global_batch_info["dp_size"] = ranks
    mask = fields["response_mask"].bool()
    losses: list[Tensor] = []
    measured: dict[str, Any] = {}
    for name in terms.advantages:
        one, measured = _clipped_loss(
            old_log_prob=fields["old_log_probs"],
            log_prob=logprobs,
            advantages=fields[name],
            response_mask=mask,
            loss_agg_mode="token-sum",
            config=config,
        )
        losses.append(one)
    loss = torch.stack(losses).sum()
    metrics = Metric.from_dict(measured, aggregation=AggregationType.MEAN)
    weights = fields["token_weights"] * mask
    if terms.kl:
        divergence = (weights * reverse_kl(logprobs, fields["ref_log_prob"])).sum() * ranks
        loss = loss + terms.kl * divergence
        metrics["actor/reference_kl"] = Metric(AggregationType.SUM, divergence.detach())
    if terms.entropy:
        assert entropies is not None
        entropy = (weights * entropies).sum() * ranks
        loss = loss - terms.entropy * entropy
    return loss, metrics
