"""What verl's rollout workers run: one session per prompt, which grows the prompt's whole graph.

Imported by verl's processes only. How a graph is grown and credited is not known here: the run
names a function that makes a ``GraphWorker`` of its configuration.
"""

import math
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import cache
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from ray.exceptions import RayError
from verl.experimental.agent_loop.agent_loop import (
    AgentLoopBase,
    AgentLoopMetrics,
    AgentLoopOutput,
    register,
)

from graphpo_agent.engines.verl.launch import SEE_LOG, cause_of
from graphpo_agent.engines.verl.policy import Drawn, ServerPolicy
from graphpo_agent.engines.verl.rows import WeightedRow
from graphpo_agent.engines.verl.shared_rows import text_order
from graphpo_agent.engines.verl.worker import GraphWorker, task_from_line
from graphpo_agent.errors import GraphPOError, first_line
from graphpo_agent.named import callable_of
from graphpo_agent.rollout.outages import Outages

__all__ = ["AnswerLoop", "GraphLoop", "advantage_field"]

_THREADS = ThreadPoolExecutor(max_workers=256, thread_name_prefix="graph")
"""Each grows one graph; they mostly wait."""


@cache
def _worker(maker: str, config: str) -> GraphWorker:
    make: Callable[[str], GraphWorker] = callable_of(maker, "config")
    return make(config)


def advantage_field(term: int) -> str:
    """The name under which an advantage term travels."""
    return f"graph_advantages_{term}"


class _Row(AgentLoopOutput):
    """A row with further numbers beside its tokens."""

    token_fields: dict[str, list[float]]

    def as_dict(self) -> dict[str, Any]:
        """As verl stores it."""
        fields = super().as_dict()
        for name, values in fields.pop("token_fields").items():
            fields[name] = torch.tensor(values, dtype=torch.float32)
        return fields


class _Loop(AgentLoopBase):
    """What both kinds of session share."""

    def _worker(self) -> GraphWorker:
        own = self.config.graphpo
        return _worker(own.worker, own.config)

    def _policy(self, worker: GraphWorker, versions: list[int]) -> ServerPolicy:
        """The servers; all requests of a session go to the one that has its prefixes."""
        session = uuid4().hex

        async def generate(token_ids: list[int], sampling: dict[str, Any]) -> Drawn:
            drawn = await self.server_manager.generate(
                request_id=session, prompt_ids=token_ids, sampling_params=sampling
            )
            version = drawn.extra_fields.get("global_steps")
            if version is not None:
                versions.append(version)
            cached = drawn.extra_fields.get("num_cached_tokens") or 0
            return Drawn(drawn.token_ids, drawn.log_probs or [], cached)

        return ServerPolicy(
            generate, self.loop, worker.tokenizer, worker.stops, worker.max_context_tokens
        )

    def _row(
        self,
        row: WeightedRow,
        reward: float,
        versions: list[int],
        note: dict[str, Any],
        verdict: dict[str, Any] | None = None,
    ) -> _Row:
        start = row.prompt_tokens
        numbers = {advantage_field(k): a[start:].tolist() for k, a in enumerate(row.advantages)}
        numbers["graph_weights"] = row.weights[start:].tolist()
        own = [0.0] * len(row.token_ids[start:])
        own[-1] = reward
        return _Row(
            prompt_ids=row.token_ids[:start].tolist(),
            response_ids=row.token_ids[start:].tolist(),
            response_mask=row.loss_mask[start:].astype(int).tolist(),
            response_logprobs=[0.0 if math.isnan(x) else x for x in row.logprobs[start:].tolist()],
            # verl repeats the last row's reward on all of a session's rows; rm_scores is the row's.
            reward_score=reward,
            num_turns=0,
            metrics=AgentLoopMetrics(),
            token_fields=numbers | {"rm_scores": own},
            extra_fields={
                "turn_scores": [],
                "tool_rewards": [],
                "reward_extra_info": verdict or {},
                "min_global_steps": min(versions, default=0),
                "max_global_steps": max(versions, default=0),
                "graph": note,
            },
        )


@register("graphpo")
class GraphLoop(_Loop):
    """Grows the graph of a training prompt."""

    async def run(  # pyright: ignore[reportIncompatibleMethodOverride] (verl takes lists too)
        self, sampling_params: dict[str, Any], **kwargs: Any
    ) -> list[_Row]:
        """The graph's rows in text order; the first one brings the graph's tally.

        What ends a run comes back as a row too: the trainer raises.
        """
        del sampling_params  # the run's own, which the worker knows
        versions: list[int] = []
        terms = int(self.config.graphpo.terms)
        try:
            worker = self._worker()
            policy = self._policy(worker, versions)
            grown = await self.loop.run_in_executor(
                _THREADS,
                worker.grow,
                policy,
                task_from_line(kwargs["task"]),
                int(kwargs["global_steps"]),
            )
        except Exception as error:  # verl would leave the prompt out without a word
            note = {"total": 0.0, "error": _told(error)}
            return [self._row(_nothing(terms), 0.0, versions, note)]
        order, added = text_order([row.token_ids for row in grown.rows])
        notes: list[dict[str, Any]] = [{"total": grown.total, "added": more} for more in added]
        notes[0] |= {"tally": asdict(grown.tally), "outages": asdict(grown.outages)}
        notes[0] |= {"counts": grown.counts, "line": grown.line}
        reward = grown.tally.metrics.get("reward/mean", 0.0)
        return [
            self._row(grown.rows[i], reward, versions, note)
            for i, note in zip(order, notes, strict=True)
        ]


@register("graphpo_heldout")
class AnswerLoop(_Loop):
    """Answers a held-out task once."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> _Row:
        """One trajectory, its reward, and the outages it met, which may have left it out.

        What ends a run comes back as a row too: the trainer raises.
        """
        del sampling_params
        versions: list[int] = []
        try:
            worker = self._worker()
            policy = self._policy(worker, versions)
            row, reward, met = await self.loop.run_in_executor(
                _THREADS,
                worker.answer,
                policy,
                task_from_line(kwargs["task"]),
                int(kwargs["session_id"]),
            )
        except Exception as error:  # verl would leave the task out of the accuracy
            nothing = _nothing(int(self.config.graphpo.terms))
            verdict = {"outages": asdict(Outages()), "error": _told(error)}
            return self._row(nothing, 0.0, versions, {}, verdict)
        verdict = {"outages": asdict(met), "error": None}
        return self._row(row, reward or 0.0, versions, {}, verdict)


def _told(error: Exception) -> str:
    """An error in one line; that of a program's mistake with its place, and all in the log."""
    cause = cause_of(error)
    if isinstance(cause, GraphPOError):
        return str(cause)
    said = f"{type(cause).__name__}: {first_line(cause)}"
    if isinstance(error, RayError):
        return f"a vLLM server failed: {said} {SEE_LOG}"
    traceback.print_exception(cause)
    if isinstance(cause, OSError) and cause.filename is not None:
        said += f": {cause.filename}"
    frames = traceback.extract_tb(cause.__traceback__)
    return f"{said} in {frames[-1].filename}:{frames[-1].lineno} {SEE_LOG}" if frames else said


def _nothing(terms: int) -> WeightedRow:
    """A row of two tokens, none of them trained."""
    return WeightedRow(
        token_ids=np.zeros(2, np.int64),
        prompt_tokens=1,
        loss_mask=np.zeros(2, np.bool_),
        logprobs=np.zeros(2, np.float32),
        weights=np.zeros(2),
        advantages=np.zeros((terms, 2)),
    )
