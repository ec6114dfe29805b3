"""What a run's ``engine.overrides`` may not ask of verl."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from graphpo_agent.errors import ConfigError

__all__ = ["check_composed", "check_overrides"]

_LEAVE = "leave it out"
_NOT_VERLS = {
    "actor_rollout_ref.actor.entropy_coeff": "set update.entropy_coefficient",
    "actor_rollout_ref.actor.kl_loss_coef": "set update.kl_coefficient",
    "actor_rollout_ref.actor.loss_agg_mode": "set update.loss_aggregation",
    "actor_rollout_ref.actor.policy_loss": _LEAVE,
    "actor_rollout_ref.actor.ppo_mini_batch_size": "set update.minibatch_graphs",
    "actor_rollout_ref.actor.shuffle": _LEAVE,
    "actor_rollout_ref.actor.use_kl_loss": "set update.kl_coefficient",
    "actor_rollout_ref.rollout.n": "set method",
    "actor_rollout_ref.rollout.temperature": "set sampling.temperature",
    "actor_rollout_ref.rollout.top_p": "set sampling.top_p",
    "algorithm": "set method and update",
    "data.custom_cls": _LEAVE,
    "data.train_batch_size": "set train.prompts_per_step",
    "data.train_files": "set tasks.train",
    "data.val_files": "set tasks.heldout",
    "data.val_max_samples": "set train.eval_tasks",
    "graphpo": _LEAVE,
    "trainer.critic_warmup": _LEAVE,
    "trainer.default_local_dir": "set output",
    "trainer.resume_mode": "give --resume",
    "trainer.total_epochs": "set train.steps",
    "trainer.total_training_steps": "set train.steps",
    "trainer.v1": _LEAVE,
    "trainer.val_only": _LEAVE,
}
"""What has no effect on graphs or would tear them apart, and what to do instead.

A name stands for those below it, too.
"""


def check_overrides(overrides: Sequence[str]) -> None:
    """Check that overrides name settings that are verl's.

    Raises:
        ConfigError: one names what the run's own settings decide.
    """
    for override in overrides:
        name = override.partition("=")[0].strip().lstrip("+")
        for own, instead in _NOT_VERLS.items():
            if f"{name}.".startswith(f"{own}.") and name != "graphpo.sync_seconds":
                raise ConfigError(
                    f"engine.overrides: {name} is not verl's to decide here: {instead}"
                )


def check_composed(composed: Any) -> None:
    """Check what overrides have made of verl's whole configuration.

    Args:
        composed: see ``launch.compose``.

    Raises:
        ConfigError: one asks for what only verl's own engine does, where ours is to update, or
            gives what is ours a value that it cannot have.
    """
    own = composed.graphpo
    seconds = own.sync_seconds
    if not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
        raise ConfigError(
            f"engine.overrides: graphpo.sync_seconds={seconds}: want a number of seconds above 0"
        )
    part = composed.actor_rollout_ref
    parallel = {
        "actor.ulysses_sequence_parallel_size": part.actor.ulysses_sequence_parallel_size,
        "actor.fsdp_config.ulysses_sequence_parallel_size": (
            part.actor.fsdp_config.ulysses_sequence_parallel_size
        ),
    }
    if own.shares_prefixes:
        _check_sharing(part, parallel)
    attention = part.model.override_config.get("attn_implementation", "flash_attention_2")
    for name, size in parallel.items():
        if size > 1 and not attention.startswith("flash"):  # each rank would see its own part only
            raise ConfigError(
                f"engine.overrides: actor_rollout_ref.{name}={size} needs flash attention, and "
                f"attention is {attention} here; leave it out"
            )


def _check_sharing(part: Any, parallel: Mapping[str, int]) -> None:
    for name, value, wanted in (
        ("actor.strategy", part.actor.strategy, "fsdp2"),
        *((name, size, 1) for name, size in parallel.items()),
        ("model.use_fused_kernels", part.model.use_fused_kernels, False),
    ):
        if value != wanted:
            raise ConfigError(
                f"engine.overrides: with actor_rollout_ref.{name}={value} rows cannot share their "
                "prefixes; leave it out, or set engine.share_prefixes=false"
            )
