"""PROS's pool: beginnings of earlier right answers, to be continued in later iterations."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from graphpo_agent.errors import ConfigError, GraphError
from graphpo_agent.graph.arrays import FloatArray
from graphpo_agent.graph.rollout_graph import RolloutGraph
from graphpo_agent.methods.pass_rates import LogOddsPrior, pass_rates
from graphpo_agent.types import NO_PREFIX, Prefix, Task

__all__ = ["Grown", "PoolOptions", "PrefixPool", "valuable_prefix"]

TokenArray: TypeAlias = NDArray[np.int32]

_CORRECT = 0.5
"""A reward above this is a right answer."""
_NO_TOKENS: TokenArray = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """How a pool estimates pass rates and how much it holds.

    The paper's code is not public. σ = 0.3 and λ = 0.99 are the defaults that a public note on the
    paper reports; μ, τ, the length of the Gibbs chain and a limit of the pool are not known, and
    the values here are this project's.

    Attributes:
        mean: μ, the prior log-odds of a question's pass rate.
        spread: τ, their standard deviation, above 0.
        child_spread: σ, that of a prefix's around its question's, above 0.
        decay: λ in (0, 1], by which all counts are multiplied before each update.
        draws: kept Gibbs sweeps.
        burn_in: sweeps before them.
        max_prefixes: of one question.
        max_prefix_tokens: longer prefixes are not kept; None: no limit. Prefixes of prefixes grow,
            and prompt, prefix and continuation together must fit the policy's context.
        cut: a prefix ends before the most uncertain ``token``, or with the last whole ``edge``
            before it, which agent mode needs.

    Raises:
        ConfigError: a value outside its range.
    """

    mean: float = 0.0
    spread: float = 1.5
    child_spread: float = 0.3
    decay: float = 0.99
    draws: int = 50
    burn_in: int = 10
    max_prefixes: int = 16
    max_prefix_tokens: int | None = None
    cut: Literal["token", "edge"] = "token"

    def __post_init__(self) -> None:
        if not np.isfinite(self.mean):
            raise ConfigError(f"pool: mean {self.mean} is not a finite number")
        for name, spread in (("spread", self.spread), ("child_spread", self.child_spread)):
            if not 0 < spread < float("inf"):
                raise ConfigError(f"pool: {name} {spread} is not a finite number above 0")
        if not 0 < self.decay <= 1:
            raise ConfigError(f"pool: decay {self.decay} is outside (0, 1]")
        for name, count, least in (
            ("draws", self.draws, 1),
            ("burn_in", self.burn_in, 0),
            ("max_prefixes", self.max_prefixes, 1),
            ("max_prefix_tokens", self.max_prefix_tokens, 1),
        ):
            if count is not None and count < least:
                raise ConfigError(f"pool: {name} {count} is less than {least}")


@dataclass(frozen=True, slots=True)
class Grown:
    """A graph that was grown from what ``PrefixPool.choose`` chose.

    Attributes:
        graph: its paths hold the continuation only.
        recall: what the expander remembers of the state at a node's position
            (``Expander.recall``); asked for whole edges only.
    """

    task: Task
    prefix: Prefix
    graph: RolloutGraph
    recall: Callable[[int], Any]


@dataclass(slots=True, eq=False)
class _Question:
    """A question and its prefixes. Entry 0 is the question itself, the empty prefix.

    Token ids are arrays: a pool may hold hundreds of millions.
    """

    token_ids: list[TokenArray]
    memories: list[Any]
    passes: FloatArray
    trials: FloatArray

    @property
    def has_prefixes(self) -> bool:
        """Whether there is anything to choose from but the question itself."""
        return len(self.token_ids) > 1

    def prefix(self, place: int) -> Prefix:
        """What stands there."""
        return Prefix(tuple(self.token_ids[place].tolist()), self.memories[place])

    def place(self, token_ids: TokenArray) -> int | None:
        """Where a prefix stands, known by its tokens; None where it does not."""
        same = (i for i, ids in enumerate(self.token_ids) if np.array_equal(ids, token_ids))
        return next(same, None)

    def add(self, token_ids: TokenArray, memory: Any, limit: int) -> None:
        """Take a new prefix in; beyond ``limit`` the least promising of all goes.

        That is the one whose rate, (passes + ½)/(trials + 1), lies farthest from ½, and of equals
        the oldest.
        """
        self.token_ids.append(token_ids)
        self.memories.append(memory)
        self.passes = np.append(self.passes, 0.0)
        self.trials = np.append(self.trials, 0.0)
        if len(self.token_ids) > limit + 1:
            rate = (self.passes + 0.5) / (self.trials + 1)
            worst = 1 + int(np.argmax(np.abs(rate - 0.5)[1:]))
            del self.token_ids[worst], self.memories[worst]
            self.passes = np.delete(self.passes, worst)
            self.trials = np.delete(self.trials, worst)


class PrefixPool:
    """Questions with the prefixes that their right answers left behind (PROS, sections 3 and 4).

    A trainer keeps one over its whole run. Each iteration it asks ``choose`` from where to grow its
    tasks' graphs, puts the prefix behind the prompt as part of the root (so that it carries no
    loss) and before the continuation where the verifier reads, and tells ``update`` of every graph
    that was grown, also of those it does not train on.

    A prefix that continues another is a prefix of the same question, whole from the end of the
    prompt: the tree has two levels. The paper picks its batch from all questions and prefixes; here
    the run's order of tasks decides which questions come, the pool where each is continued from.

    Example::

        pool = PrefixPool(PoolOptions())
        chosen = pool.choose(tasks, rng)    # {"t1": Prefix(), "t2": Prefix((12, 40, 41)), ...}
        graphs = [grow(task, chosen[task.id]) for task in tasks]
        pool.update([Grown(t, chosen[t.id], g, recall) for t, g in zip(tasks, graphs)])
    """

    def __init__(self, options: PoolOptions) -> None:
        self._options = options
        self._questions: dict[str, _Question] = {}

    def choose(self, tasks: Sequence[Task], rng: np.random.Generator) -> dict[str, Prefix]:
        """For each task's id the prefix whose estimated pass rate is nearest to one half.

        The question itself, the empty prefix, is among the candidates, and is what a task without
        prefixes gets; of equals the oldest is taken.

        Args:
            tasks: in any order.
            rng: of the estimates; the same pool, tasks and state of it give the same choice.
        """
        asked = {task.id: self._questions[task.id] for task in tasks if task.id in self._questions}
        branched = {name: question for name, question in asked.items() if question.has_prefixes}
        rates = self._rates(list(branched.values()), rng)
        chosen = {
            name: question.prefix(int(np.argmin(np.abs(rate - 0.5))))
            for (name, question), rate in zip(branched.items(), rates, strict=True)
        }
        return {task.id: chosen.get(task.id, NO_PREFIX) for task in tasks}

    def update(self, grown: Sequence[Grown]) -> None:
        """Learn from graphs: decay all counts, count rewards, keep prefixes of right answers.

        Early-stopped paths count nowhere. Rewards between 0 and 1 count in part; above one half an
        answer is right.

        Args:
            grown: what was grown from what ``choose`` gave. The rewards of a prefix that the pool
                no longer holds are not counted.

        Raises:
            GraphError: a right answer without token ids or log-probabilities.
        """
        for question in self._questions.values():
            question.passes *= self._options.decay
            question.trials *= self._options.decay
        for one in grown:
            question = self._questions.setdefault(one.task.id, _new_question())
            place = question.place(np.array(one.prefix.token_ids, np.int32))
            rewards = one.graph.reward[one.graph.terminals]
            if place is not None:
                question.passes[place] += rewards.sum()
                question.trials[place] += len(rewards)
            for leaf in one.graph.terminals[rewards > _CORRECT].tolist():
                self._keep(question, one, leaf)

    def state(self) -> tuple[dict[str, Any], TokenArray]:
        """Everything the pool knows: JSON values, and [T] the tokens of all prefixes in a row."""
        questions = self._questions
        record = {
            name: {
                "lengths": [len(ids) for ids in question.token_ids],
                "memories": list(question.memories),
                "passes": question.passes.tolist(),
                "trials": question.trials.tolist(),
            }
            for name, question in questions.items()
        }
        token_ids = [ids for question in questions.values() for ids in question.token_ids]
        return record, np.concatenate([_NO_TOKENS, *token_ids])

    def restore(self, record: Mapping[str, Any], token_ids: TokenArray) -> None:
        """Forget everything and know what ``state`` returned instead.

        Raises:
            ValueError: there are more or fewer tokens than the record tells of.
        """
        lengths = [length for told in record.values() for length in told["lengths"]]
        if sum(lengths) != len(token_ids):
            raise ValueError(f"{len(token_ids)} tokens, want {sum(lengths)}")
        each = (ids.copy() for ids in np.split(token_ids, np.cumsum(lengths)))
        self._questions = {
            name: _Question(
                list(islice(each, len(told["lengths"]))),
                told["memories"],
                np.array(told["passes"], np.float64),
                np.array(told["trials"], np.float64),
            )
            for name, told in record.items()
        }

    def _keep(self, question: _Question, one: Grown, leaf: int) -> None:
        """Keep the beginning of a right answer, unless it is known, empty or too long."""
        further, memory = valuable_prefix(one.graph, leaf), None
        if self._options.cut == "edge":
            node, whole = _whole_edges(one.graph, leaf, len(further))
            further, memory = further[:whole], one.recall(node)
        token_ids = np.concatenate([np.array(one.prefix.token_ids, np.int32), further])
        longest = self._options.max_prefix_tokens
        fits = longest is None or len(token_ids) <= longest
        if len(further) and fits and question.place(token_ids) is None:
            question.add(token_ids, memory, self._options.max_prefixes)

    def _rates(self, questions: Sequence[_Question], rng: np.random.Generator) -> list[FloatArray]:
        """The estimated pass rate of every entry of each question."""
        if not questions:
            return []
        sizes = np.array([len(q.token_ids) for q in questions])
        first = np.cumsum(sizes) - sizes
        parent = np.repeat(first, sizes)
        parent[first] = -1
        options = self._options
        rates = pass_rates(
            parent,
            np.concatenate([q.passes for q in questions]),
            np.concatenate([q.trials for q in questions]),
            LogOddsPrior(options.mean, options.spread, options.child_spread),
            draws=options.draws,
            burn_in=options.burn_in,
            rng=rng,
        )
        return np.split(rates, first[1:])


def valuable_prefix(graph: RolloutGraph, leaf: int) -> TokenArray:
    """y[:t*], the response up to its most uncertain token in [T/4, 3T/4) (PROS, section 3).

    t* is the first token of largest entropy. Graphs hold log-probabilities only, so −log p of the
    sampled token, whose expectation the entropy is, stands for it. (The paper's filter by a
    critic's values has no place here: there is no critic.)

    Args:
        graph: with tokens and log-probabilities.
        leaf: position of the end of the response, whose T tokens are those of the path to it.

    Returns:
        [t*] token ids; none where no sampled token lies in that range.

    Raises:
        GraphError: token ids or log-probabilities are unknown.
    """
    path = graph.path(leaf)
    _check_known(graph, path)
    tokens = np.r_[tuple(graph.span(v) for v in path)]
    surprise = np.where(graph.loss_mask[tokens], -graph.logprobs[tokens], -np.inf)
    length = len(tokens)
    low, high = -(-length // 4), -(-3 * length // 4)
    between = surprise[low:high]
    if not len(between) or between.max() == -np.inf:
        return _NO_TOKENS
    return graph.token_ids[tokens[: low + int(np.argmax(between))]].astype(np.int32)


def _whole_edges(graph: RolloutGraph, leaf: int, count: int) -> tuple[int, int]:
    """The last node on the way to a leaf within ``count`` tokens, and how many lead to it."""
    path = np.array([0, *graph.path(leaf)])
    behind = np.concatenate([[0], np.cumsum(np.diff(graph.offsets)[path[1:]])])
    last = int(np.searchsorted(behind, count, side="right")) - 1
    return int(path[last]), int(behind[last])


def _check_known(graph: RolloutGraph, path: Sequence[int]) -> None:
    for v in path:
        span = graph.span(v)
        sampled = graph.loss_mask[span]
        missing = "tokens" if not graph.has_tokens[v] else "logprobs"
        if missing == "tokens" or np.isnan(graph.logprobs[span][sampled]).any():
            raise GraphError(
                f"graph {graph.id!r}, node {graph.node_ids[v]}: method pros needs its tokens and "
                f"their log-probabilities (field `{missing}`)"
            )


def _new_question() -> _Question:
    return _Question([_NO_TOKENS], [None], np.zeros(1), np.zeros(1))
