"""What the workers of a run through verl grow and credit graphs with."""

import json
from dataclasses import dataclass, replace

import numpy as np

from graphpo_agent.build import (
    build_budget,
    build_grower,
    build_objective,
    build_sampling,
    build_step_scoring,
)
from graphpo_agent.build_method import build_method
from graphpo_agent.config import RunConfig
from graphpo_agent.engines.local.drawing import StopFinder
from graphpo_agent.engines.local.model import model_config
from graphpo_agent.engines.local.token_weights import LossAggregation
from graphpo_agent.engines.tokenizer import HfTokenizer
from graphpo_agent.engines.verl.rows import WeightedRow, moving_rows, weighted_rows
from graphpo_agent.engines.verl.settings import advantage_terms, verl_engine
from graphpo_agent.engines.verl.worker import GrownGraph
from graphpo_agent.errors import ConfigError
from graphpo_agent.evals.heldout import leaves
from graphpo_agent.graph.budget import Budget
from graphpo_agent.graph.jsonl import graph_to_json
from graphpo_agent.graph.samples import TrainingSample
from graphpo_agent.graph.step_id import step_id
from graphpo_agent.methods.grpo import Grpo
from graphpo_agent.methods.method import Method, credits_of, training_sample
from graphpo_agent.protocols import Policy, Tokenizer
from graphpo_agent.rollout.counts import Counts
from graphpo_agent.rollout.grow import Grower, Rollout
from graphpo_agent.rollout.outages import Outages, outages_of
from graphpo_agent.rollout.seeds import derive_seed
from graphpo_agent.rollout.step_scores import StepScoring
from graphpo_agent.rollout.tally import Tally, credit_tally, rollout_tally
from graphpo_agent.types import SamplingParams, Task

__all__ = ["RunWorker", "make_worker"]


@dataclass(frozen=True, slots=True)
class RunWorker:
    """A run's own way to grow and credit a graph (``engines.verl.worker.GraphWorker``)."""

    tokenizer: Tokenizer
    stops: StopFinder
    max_context_tokens: int
    grower: Grower
    method: Method
    budget: Budget
    sampling: SamplingParams
    step_scoring: StepScoring | None
    counts: Counts
    aggregation: LossAggregation
    horizon: int
    moves_all: bool
    terms: int
    seed: int
    prompts_per_step: int

    def grow(self, policy: Policy, task: Task, step: int) -> GrownGraph:
        """The graph of one task of a training step: grown, scored, credited, cut into rows.

        Raises:
            ConfigError: the method gives an edge another number of advantages than it said.
        """
        (rollout,) = self.grower.grow(
            policy,
            [task],
            self.method,
            self.sampling,
            (self.seed, step),
            self.budget,
            scoring=self.step_scoring,
        )
        (credit,) = credits_of(self.method, [rollout.graph], [rollout.classes])
        tally = rollout_tally([rollout]) + credit_tally([credit])
        tally += Tally({"tokens/prefill_computed": policy.take_prefilled_tokens()})
        sample = training_sample(rollout.graph, credit)
        self._check_terms(sample)
        rows = weighted_rows(sample, self.aggregation, self.horizon)
        counts, met = self.counts.take(), outages_of([rollout], policy.tokenizer.decode)
        if not credit.has_signal or not rows.rows:
            return GrownGraph([_untrained(rollout, self.terms)], 0.0, tally, counts, met)
        line = None
        if derive_seed(step, task.id) % self.prompts_per_step == 0:  # about one a step
            named = replace(rollout.graph, id=step_id(step, task.id))
            line = graph_to_json(named, credit.classes)
        trained = rows.rows if self.moves_all else moving_rows(rows.rows)
        trained = trained or [_untrained(rollout, self.terms)]
        return GrownGraph(trained, rows.total, tally, counts, met, line)

    def _check_terms(self, sample: TrainingSample) -> None:
        found = 1 if sample.row_advantages is not None else len(sample.advantages)
        if found != self.terms:
            raise ConfigError(
                f"method {self.method.name} gives an edge {found} advantages, and verl was told of "
                f"{self.terms}: set method.terms={found}"
            )

    def answer(
        self, policy: Policy, task: Task, number: int
    ) -> tuple[WeightedRow, float | None, Outages]:
        """One trajectory of a held-out task, judged as ``evals.heldout`` does."""
        (rollout,) = self.grower.grow(
            policy, [task], Grpo(group_size=1), self.sampling, (self.seed, "evaluation", number)
        )
        self.counts.take()  # metrics of a step are of its training
        ((_, reward),) = leaves(rollout)
        met = outages_of([rollout], policy.tokenizer.decode)
        return _untrained(rollout, self.terms), reward, met


def make_worker(config: str) -> RunWorker:
    """A worker of a run, in a process of verl's.

    Args:
        config: the resolved configuration, as JSON.
    """
    run = RunConfig.model_validate(json.loads(config))
    tokenizer = HfTokenizer.load(run.model.path)
    grower, step_scoring = build_grower(run), build_step_scoring(run.method, tokenizer)
    return RunWorker(
        tokenizer=tokenizer,
        stops=StopFinder(tokenizer, model_config(run.model.path).vocab_size),
        max_context_tokens=verl_engine(run).max_context_tokens,
        grower=grower,
        method=build_method(run.method),
        budget=build_budget(run.budget),
        sampling=build_sampling(run.sampling),
        step_scoring=step_scoring,
        counts=Counts(grower, step_scoring),
        aggregation=run.update.loss_aggregation,
        horizon=run.mode.max_response_tokens,
        moves_all=build_objective(run.update).moves_all,
        terms=advantage_terms(run.method),
        seed=run.seed,
        prompts_per_step=run.train.prompts_per_step,
    )


def _untrained(rollout: Rollout, terms: int) -> WeightedRow:
    """The first path of a graph, none of it trained."""
    graph = rollout.graph
    path = [0, *graph.path(int(graph.leaves[0]))]
    tokens = np.r_[tuple(graph.span(v) for v in path)]
    return WeightedRow(
        token_ids=graph.token_ids[tokens],
        prompt_tokens=int(graph.offsets[1]),
        loss_mask=graph.loss_mask[tokens],
        logprobs=graph.logprobs[tokens],
        weights=np.zeros(len(tokens)),
        advantages=np.zeros((terms, len(tokens))),
    )
