"""verl's synchronous trainer with our advantages, minibatches, loss and log.

Imported by verl's processes only.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import transfer_queue as tq
from omegaconf import DictConfig, open_dict
from tensordict import TensorDict
from torch import Tensor
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
from verl.trainer.ppo.v1 import trainer_base
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.config import omega_conf_to_dataclass

from graphpo_agent.engines.local.loss import mismatch_weights
from graphpo_agent.engines.local.metrics import mismatch
from graphpo_agent.engines.minibatches import minibatches
from graphpo_agent.engines.ports import PORTS, own_port
from graphpo_agent.engines.verl.layout import place_rows
from graphpo_agent.engines.verl.log import RunLog, step_metrics
from graphpo_agent.engines.verl.loop import advantage_field
from graphpo_agent.engines.verl.loss import LossTerms, graph_loss
from graphpo_agent.errors import RunError
from graphpo_agent.net.workers import Workers
from graphpo_agent.rollout.outages import Outages

__all__ = ["TRAINER", "GraphTrainer", "meeting_apart"]

TRAINER = "graphpo"
_POLL_SECONDS = 0.05
_PARTITION = "train"


@dataclass(frozen=True, slots=True)
class _Update:
    """What is trained in a step.

    Attributes:
        minibatches: how many; 0: no graph has an advantage.
        rows: of a minibatch, empty ones included.
        divisors: by row key, what its minibatch's sum is divided by.
        row_tokens: tokens of all rows, empty ones left out.
    """

    minibatches: int
    rows: int
    divisors: Mapping[str, float]
    row_tokens: int


_NOTHING = _Update(0, 0, {}, 0)


@contextmanager
def meeting_apart() -> Iterator[None]:
    """Worker groups that are made in the ``with`` block meet at a port of their own.

    verl would take one that Linux gives to connections.
    """
    maker: Any = trainer_base
    group = maker.RayWorkerGroup
    maker.RayWorkerGroup = partial(group, master_port_range=[own_port(), PORTS.stop])
    try:
        yield
    finally:
        maker.RayWorkerGroup = group


@register_trainer(TRAINER)
class GraphTrainer(PPOTrainerSync):
    """Trains graphs whose rows bring their own advantages.

    A batch holds the rows of the graphs with an advantage, in an order in which verl's minibatches
    are those of the local engine's first epoch.
    """

    def __init__(self, config: DictConfig) -> None:
        with open_dict(config):
            config.trainer.v1.trainer_mode = "sync"  # verl asks for its own names
        self._own = config.graphpo
        self._run_log = RunLog(Path(self._own.run), self._own.steps)
        self._metrics: dict[str, float] = {}
        self._update = _NOTHING
        super().__init__(config)
        self.replay_buffer.poll_interval = _POLL_SECONDS

    @property
    def logger(self) -> Any:
        """Verl's trackers, to which the run's own log is added."""
        return self._tracking

    @logger.setter
    def logger(self, tracking: Any) -> None:
        tracking.logger["graphpo"] = self._run_log
        self._tracking = tracking

    def _setup(self) -> None:
        with meeting_apart():
            super()._setup()
        actor = omega_conf_to_dataclass(self.config.actor_rollout_ref.actor)
        self._terms = [advantage_field(term) for term in range(self._own.terms)]
        terms = LossTerms(("advantages", *self._terms[1:]), self._own.kl, self._own.entropy)
        self.actor_rollout_wg.set_loss_fn(partial(graph_loss, actor, terms))

    @property
    def _ranks(self) -> int:
        """Processes that get rows of their own; those that share a row (Ulysses) are one."""
        group: Any = self.actor_rollout_wg
        if "actor" not in group._dispatch_info:
            group._dispatch_info["actor"] = group._query_dispatch_info("actor")
        return max(group._dispatch_info["actor"]) + 1

    def on_init_end(self) -> None:
        """Give the servers their first weights."""
        self._in_time(super().on_init_end)

    def on_step_end(self) -> None:
        """Give the servers the new weights."""
        self._in_time(super().on_step_end)

    def _in_time(self, give_weights: Callable[[], object]) -> None:
        """Raise RunError where the servers do not take the weights: verl would wait for ever."""
        seconds = self._own.sync_seconds
        try:
            Workers().submit(give_weights).result(timeout=seconds)
        except FutureTimeout:
            raise RunError(
                f"step {self.global_steps}: a vLLM server did not take the new weights in "
                f"{seconds:g} seconds (graphpo.sync_seconds); it has probably died"
            ) from None

    def _balance_batch(
        self, batch: KVBatchMeta, metrics: dict[str, Any], *_: Any, **__: Any
    ) -> KVBatchMeta:
        """Leave out what is not trained, and lay the rest out in minibatches of whole graphs."""
        batch = batch.select_keys(sorted(batch.keys, key=_place))
        tasks = [_place(key)[0] for key in batch.keys]
        self._check_complete(tasks)
        notes = [fields["graph"] for fields in _column(batch, "extra_fields")]
        for note in notes:
            if note.get("error"):
                raise RunError(note["error"])
        met = (Outages(**note["outages"]) for note in notes if "outages" in note)
        sum(met, Outages()).check(self._own.outage_limit)
        self._metrics = step_metrics(notes)
        self._run_log.log_graph(notes)
        trained = [i for i, note in enumerate(notes) if note["total"] > 0]
        if not trained:
            self._update = _NOTHING
            return upsample_batch_to_divisible_size(batch, self._ranks, self.tokenizer.eos_token_id)
        left_out = sorted(set(range(len(notes))) - set(trained))
        if left_out:
            tq.kv_clear(keys=[batch.keys[i] for i in left_out], partition_id=_PARTITION)
        batch = batch.select_keys([batch.keys[i] for i in trained])
        return self._laid_out(batch, [tasks[i] for i in trained], [notes[i] for i in trained])

    def _laid_out(
        self, batch: KVBatchMeta, tasks: list[str], notes: list[dict[str, Any]]
    ) -> KVBatchMeta:
        names = sorted(set(tasks), key=tasks.index)
        number = {name: i for i, name in enumerate(names)}
        totals = {number[task]: note["total"] for task, note in zip(tasks, notes, strict=True)}
        own = self._own
        drawn = minibatches(len(names), own.minibatch_graphs, own.seed, self.global_steps)
        groups = [members.tolist() for members in drawn]
        lengths = [tag["seq_len"] for tag in batch.tags]
        added = [note["added"] for note in notes] if own.shares_prefixes else lengths
        graph = [number[task] for task in tasks]
        layout = place_rows(lengths, added, graph, groups, self._ranks)
        divisor = {g: max(sum(totals[g] for g in group), 1.0) for group in groups for g in group}
        divisors = {key: divisor[number[task]] for key, task in zip(batch.keys, tasks, strict=True)}
        size = layout.rows_per_minibatch
        self._update = _Update(len(groups), size, divisors, sum(lengths))
        padded = upsample_batch_to_divisible_size(
            batch, len(layout.order), self.tokenizer.eos_token_id
        )
        empty = iter(range(len(tasks), len(layout.order)))
        padded.reorder([next(empty) if row is None else row for row in layout.order])
        return padded

    def _check_complete(self, tasks: list[str]) -> None:
        """Raise RunError where a prompt brought no graph."""
        missing = self.config.data.train_batch_size - len(set(tasks))
        if missing:
            raise RunError(
                f"step {self.global_steps}: {missing} prompts brought no graph; what went wrong "
                "stands in the output of verl's rollout workers (set GRAPHPO_RAY_LOG=1)"
            )

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        """Write the rows' weighted advantages, divided by what their minibatch's sum is."""
        names = [*self._terms, "graph_weights"]
        data = tq.kv_batch_get(
            keys=batch.keys,
            partition_id=_PARTITION,
            select_fields=["response_mask", "old_log_probs", "rollout_log_probs", *names],
        )
        columns = {name: column.unbind(0) for name, column in data.items()}
        masks = columns.pop("response_mask")
        shares = [1.0 / self._update.divisors.get(key, float("inf")) for key in batch.keys]
        trained = [mask.bool() & (share > 0) for mask, share in zip(masks, shares, strict=True)]
        compared = columns.pop("old_log_probs"), columns.pop("rollout_log_probs")
        weights = self._mismatch_weights(*compared, trained, metrics)
        for name in self._terms:
            columns[name] = [a * w for a, w in zip(columns[name], weights, strict=True)]
        fields: dict[str, Tensor] = {}
        for name, column in columns.items():
            values = [
                own * share if share else torch.zeros(len(mask))
                for own, mask, share in zip(column, masks, shares, strict=True)
            ]
            fields[name] = torch.nested.as_nested_tensor(values, layout=torch.jagged)
        fields["token_weights"] = fields.pop("graph_weights")
        fields["advantages"] = fields["returns"] = fields.pop(self._terms[0])
        return tq.kv_batch_put(
            keys=batch.keys,
            partition_id=_PARTITION,
            fields=TensorDict(fields, batch_size=len(batch)),
        )

    def _mismatch_weights(
        self,
        old: Sequence[Tensor],
        sampled: Sequence[Tensor],
        trained: Sequence[Tensor],
        metrics: dict[str, Any],
    ) -> Sequence[Tensor]:
        """Per row [T] what its gains are multiplied by; how far the servers are off is measured.

        Args:
            old: per row [T] log-probabilities.
            sampled: per row [T] those of the servers.
            trained: per row [T] which tokens are.
            metrics: of the step.
        """
        cap = self._own.mismatch_cap
        both = list(zip(old, sampled, strict=True))
        weights = [mismatch_weights(a, b, cap) if cap else torch.ones_like(a) for a, b in both]
        of_all = (
            torch.cat([row[own] for row, own in zip(rows, trained, strict=True)])
            for rows in (sampled, old, weights)
        )
        recorded, recomputed, counted = of_all
        if not self.config.algorithm.rollout_correction.bypass_mode:
            metrics |= mismatch(recorded.float().numpy(), recomputed.double().numpy())
        if cap and len(counted):
            metrics["update/mismatch_capped"] = (counted >= cap).double().mean().item()
        return weights

    def _update_actor(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        """One optimiser step per minibatch and epoch; none without an advantage."""
        if not self._update.minibatches:
            metrics["update/optimizer_steps"] = 0.0
            return batch
        actor = self.config.actor_rollout_ref.actor
        with open_dict(self.config):
            actor.ppo_mini_batch_size = self._update.rows
        batch = super()._update_actor(batch, metrics)
        steps = self._update.minibatches * actor.ppo_epochs
        metrics["update/optimizer_steps"] = float(steps)
        metrics["update/row_tokens"] = float(self._update.row_tokens * actor.ppo_epochs)
        mean = metrics.pop("actor/computed_tokens", None)  # over steps and ranks
        if mean is not None:
            metrics["update/computed_tokens"] = mean * steps * self._ranks
        return batch

    def _val_metrics_update(
        self,
        data_sources: list[Any],
        sample_uids: list[Any],
        reward_extra_infos_dict: dict[str, list[Any]],
        sample_turns: list[Any],
        expected_acc_counts: dict[tuple[str, str], int] | None = None,
    ) -> dict[str, float]:
        """Leave the answers that do not count out of the accuracy, and say how many they are."""
        infos = dict(reward_extra_infos_dict)
        for error in filter(None, infos.pop("error")):
            raise RunError(error)
        outages = [Outages(**one) for one in infos.pop("outages")]
        counting = [i for i, one in enumerate(outages) if not one.left_out]
        met = sum(outages, Outages())
        ours = {"eval/outages": float(met.left_out), "eval/failed_calls": float(met.failed_calls)}
        if met.reaches(self._own.outage_limit):
            return ours
        uids = [sample_uids[i] for i in counting]
        infos = {name: [values[i] for i in counting] for name, values in infos.items()}
        ours["eval/accuracy"] = _mean_over_tasks(uids, infos["reward"])
        sources, turns = ([some[i] for i in counting] for some in (data_sources, sample_turns))
        return ours | super()._val_metrics_update(sources, uids, infos, turns, expected_acc_counts)

    def _compute_metrics(
        self, batch: KVBatchMeta, metrics: dict[str, Any], *others: Any, **named: Any
    ) -> None:
        super()._compute_metrics(batch, metrics, *others, **named)
        metrics.update(self._metrics)
        metrics["update/rows"] = float(len(self._update.divisors))


def _mean_over_tasks(tasks: Sequence[str], rewards: Sequence[float]) -> float:
    """The mean over tasks of the mean reward of a task's answers, as many as there are."""
    of_task: dict[str, list[float]] = {}
    for task, reward in zip(tasks, rewards, strict=True):
        of_task.setdefault(task, []).append(reward)
    return fmean(fmean(own) for own in of_task.values())


def _place(key: str) -> tuple[str, int]:
    """A row's task, and its place among the rows of the task's graph (``uid_session_row``)."""
    task, *_, row = key.split("_")
    return task, int(row)


def _column(batch: KVBatchMeta, name: str) -> list[Any]:
    """A field that is no tensor, of every row."""
    data = tq.kv_batch_get(keys=batch.keys, partition_id=_PARTITION, select_fields=[name])
    return [getattr(value, "data", value) for value in list(data[name])]
