"""Agent mode: an edge is one ReAct turn, its tool's observation included."""

from collections.abc import Awaitable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import nan
from typing import Any

from graphpo_agent.errors import ConfigError
from graphpo_agent.protocols import Policy, PromptOpener, Scheduler, Tool
from graphpo_agent.rollout.agent_memory import AgentMemory, recall, recalled
from graphpo_agent.rollout.dialects.base import (
    Action,
    Dialect,
    FinalAnswer,
    InvalidAction,
    Observation,
    ToolCall,
    encode_observation,
)
from graphpo_agent.rollout.path import (
    behind_prefix,
    limited,
    open_path,
    out_of_budget,
    room_left,
)
from graphpo_agent.rollout.seeds import derive_seed
from graphpo_agent.types import (
    NO_PREFIX,
    Completion,
    Context,
    Document,
    FailureKind,
    Outcome,
    PathState,
    Prefix,
    SampleRequest,
    SamplingParams,
    Step,
    StepStatus,
    Task,
    ToolResult,
)

__all__ = ["TurnExpander", "check_tools"]


_STATUS_OF_FAILURE: Mapping[FailureKind | None, StepStatus] = {
    None: "ok",
    "bad_arguments": "tool_error",
    "no_result": "tool_error",
    "rate_limit": "tool_outage",
    "transient": "tool_outage",
}


@dataclass(frozen=True, slots=True)
class _Turn:
    """One sampled turn, read: ``end`` says why the path ends here, None that it goes on."""

    before: PathState
    completion: Completion
    text: str
    action: Action
    room: int
    end: StepStatus | None


@dataclass(frozen=True, slots=True)
class _Reply:
    """The environment's answer to a turn that goes on."""

    observation: Observation
    status: StepStatus
    fact: str | None = None
    """What a tool replied without naming documents, such as a program's output."""


class TurnExpander:
    """Grows a graph of ReAct turns; an ``Expander``.

    An edge holds the turn as sampled (loss mask 1) and the observation (loss mask 0,
    log-probability NaN). What a turn leads to:

    * a final answer: terminal, ``answered``; the answer is what this turn's own tokens say;
    * a tool call: the tool's result as observation, ``ok``; ``tool_error`` where what was asked for
      cannot be done or is not there, ``tool_outage`` where the outside world failed, which the
      path's ``outages`` counts;
    * neither: the dialect's correction as observation, ``invalid_action``; the turn counts. An
      end-of-sequence token sampled there stays in the path, before the correction, so that the
      policy is trained on exactly what it did;
    * the last allowed turn without an answer: terminal, ``out_of_turns``; its call is not run;
    * no room for another token after the turn, or after the observation (which is then left
      out): terminal, ``out_of_length``.

    A turn ends with the closing tag of its action; one that is a part of a call, such as an
    ``</answer>`` in its code, does not end it.

    Equal calls of one rollout are made once; ``Step.tool_calls`` is 1 where one was made and 0
    where its result was known, so that its sum counts the calls made.

    Attributes:
        max_layers: ``max_turns``.
        edge_tokens: ``max_turn_tokens``.
        path_tokens: of all turns together, within the response.
    """

    def __init__(
        self,
        *,
        dialect: Dialect,
        tools: Mapping[str, Tool],
        max_turns: int,
        max_turn_tokens: int,
        max_observation_tokens: int,
        max_response_tokens: int,
    ) -> None:
        """Set the limits.

        Args:
            dialect: how turns are written.
            tools: by the names that the dialect calls them.
            max_turns: turns of the policy on one path, the answering one included.
            max_turn_tokens: sampled tokens of one turn.
            max_observation_tokens: tokens of one observation; a longer one is cut inside its tags.
            max_response_tokens: all tokens after the prompt, observations included.

        Raises:
            ConfigError: the dialect calls other tools.
        """
        check_tools(dialect, tools)
        self.max_layers = max_turns
        self.edge_tokens = min(max_turn_tokens, max_response_tokens)
        self.path_tokens = min(max_turns * max_turn_tokens, max_response_tokens)
        self._dialect = dialect
        self._tools = tools
        self._max_turn_tokens = max_turn_tokens
        self._max_observation_tokens = max_observation_tokens
        self._max_response_tokens = max_response_tokens

    def start(self, policy: PromptOpener, task: Task, prefix: Prefix = NO_PREFIX) -> PathState:
        """The root: the prompt that the dialect writes for the task.

        A prefix is whole turns, with what ``recall`` said of the state behind them; they count as
        turns of the path.

        Raises:
            DataError: the prompt does not fit into the policy's context, or the prefix leaves no
                room in the response.
        """
        state = open_path(policy, task, self._dialect.render(task), memory=AgentMemory())
        if not prefix.token_ids:
            return state
        return recalled(
            behind_prefix(policy, state, prefix, self._max_response_tokens), prefix.memory
        )

    def tokens_left(self, policy: Policy, state: PathState) -> int:
        """The room left in the response and in the context, within the turns that are left."""
        turns = (self.max_layers - state.depth) * self._max_turn_tokens
        return min(turns, self._room(policy, state, state.context))

    def recall(self, state: PathState) -> dict[str, Any]:
        """The turns so far and what they found."""
        return recall(state)

    async def expand(
        self,
        scheduler: Scheduler,
        states: Sequence[PathState],
        seeds: Sequence[int],
        sampling: SamplingParams,
        limit: int | None = None,
    ) -> list[Step]:
        """One turn behind each state, and the environment's answer to it.

        Raises:
            ConfigError: ``max_observation_tokens`` cannot hold an observation's own tags.
            ToolError: a tool is unreachable (a single failed call is an observation instead).
        """
        policy = scheduler.policy
        full = [
            min(self._max_turn_tokens, self._room(policy, state, state.context)) for state in states
        ]
        requests = [
            limited(SampleRequest(state.context, seed, most, stop=self._dialect.stop), limit)
            for state, seed, most in zip(states, seeds, full, strict=True)
        ]
        turns: dict[int, _Turn] = {}
        called: dict[int, tuple[Awaitable[ToolResult], bool]] = {}

        def drawn(places: Sequence[int], k: int, completion: Completion) -> None:
            """Read a turn as soon as it is there, so that its tool works while others go on."""
            i = places[k]
            if i in turns:
                completion = _joined(turns[i].completion, completion)
            cut = out_of_budget(completion, limit, full[i])
            turn = turns[i] = self._read(policy, states[i], completion, cut)
            if turn.end is None and isinstance(turn.action, ToolCall):
                called[i] = scheduler.call(self._tools[turn.action.tool], turn.action.arguments)

        places = list(range(len(states)))
        while places:
            left = [
                _behind(turns[i].completion, requests[i]) if turns else requests[i] for i in places
            ]
            await scheduler.sample(left, sampling, partial(drawn, places))
            places = [i for i in places if _is_unfinished(turns[i], requests[i])]
        return [await self._answered(policy, turns[i], called.get(i)) for i in range(len(states))]

    async def _answered(
        self, policy: Policy, turn: _Turn, called: tuple[Awaitable[ToolResult], bool] | None
    ) -> Step:
        """The edge of a turn, with the environment's answer to it where the path goes on."""
        if turn.end is not None:
            return _last_step(turn, turn.end)
        if called is None:
            assert isinstance(turn.action, InvalidAction)  # a final answer has ended the path
            invalid = _Reply(self._dialect.correction(turn.action), "invalid_action")
            return self._step(policy, turn, invalid, tool_calls=0)
        assert isinstance(turn.action, ToolCall)
        result, made = called
        reply = self._reply(turn.action, await result)
        return self._step(policy, turn, reply, tool_calls=int(made))

    def cut(
        self, policy: Policy, before: PathState, after: PathState, num_tokens: int
    ) -> PathState:
        """Turns are whole."""
        raise ConfigError(
            "a turn of agent mode cannot be cut at a token; fork at edges (method.fork=edge, "
            "method.cut=edge) or use segment mode"
        )

    def outcome(self, state: PathState) -> Outcome:
        """The policy's own words and answer, and the documents it was shown."""
        memory: AgentMemory = state.memory
        return Outcome(
            state.response,
            state.answer,
            memory.turns,
            memory.documents_found,
            memory.tool_calls,
        )

    def _room(self, policy: Policy, path: PathState, context: Context) -> int:
        return room_left(path, context, self._max_response_tokens, policy.max_context_tokens)

    def _read(self, policy: Policy, before: PathState, completion: Completion, cut: bool) -> _Turn:
        """A turn's text; ``cut`` says whether the budget ended it."""
        text = policy.tokenizer.decode(completion.token_ids)
        action = self._dialect.parse(text)
        room = self._room(policy, before, completion.context)
        end: StepStatus | None = None
        if cut:
            end = "out_of_budget"
        elif isinstance(action, FinalAnswer):
            end = "answered"
        elif room < 1:
            end = "out_of_length"
        elif before.depth + 1 == self.max_layers:
            end = "out_of_turns"
        return _Turn(before, completion, text, action, room, end)

    def _reply(self, call: ToolCall, result: ToolResult) -> _Reply:
        observation = self._dialect.observation(call, result)
        stated = result.failure is None and not result.findings and result.text
        fact = result.text if stated else None
        return _Reply(observation, _STATUS_OF_FAILURE[result.failure], fact)

    def _step(self, policy: Policy, turn: _Turn, reply: _Reply, tool_calls: int) -> Step:
        sampled = turn.completion.token_ids
        ended = sampled[-1] if turn.completion.finish_reason == "eos" else None
        observed, shown = encode_observation(
            policy.tokenizer, reply.observation, self._max_observation_tokens, after_eos=ended
        )
        if len(observed) >= turn.room:
            return _last_step(turn, "out_of_length", tool_calls)
        memory: AgentMemory = turn.before.memory
        invalid = reply.status == "invalid_action"
        found = reply.observation.documents[:shown]
        return Step(
            state=replace(
                turn.before,
                context=policy.extend(turn.completion.context, observed),
                depth=turn.before.depth + 1,
                response=_join(turn.before.response, turn.text),
                outages=turn.before.outages + (reply.status == "tool_outage"),
                memory=AgentMemory(
                    turns=(*memory.turns, turn.text),
                    documents_found=_union(memory.documents_found, found),
                    tool_calls=memory.tool_calls + (not invalid),
                    invalid_actions=memory.invalid_actions + invalid,
                    facts=_with(memory.facts, reply.fact),
                ),
            ),
            token_ids=(*sampled, *observed),
            loss_mask=(1,) * len(sampled) + (0,) * len(observed),
            logprobs=turn.completion.logprobs + (nan,) * len(observed),
            terminal=False,
            status=reply.status,
            tool_calls=tool_calls,
        )


def check_tools(dialect: Dialect, names: Collection[str]) -> None:
    """Check that the tools are those that a dialect can call, by their names.

    Raises:
        ConfigError: one is missing, or cannot be called.
    """
    missing = [name for name in dialect.tool_names if name not in names]
    if missing:
        raise ConfigError(
            f"the dialect calls tools that are not configured: {', '.join(missing)}; "
            f"configured: {', '.join(names) or 'none'}"
        )
    unheard = [name for name in names if name not in dialect.tool_names]
    if unheard:
        raise ConfigError(
            f"the dialect cannot call {', '.join(unheard)}: it calls "
            f"{', '.join(dialect.tool_names) or 'none'}; leave others out or use another dialect"
        )


def _is_unfinished(turn: _Turn, request: SampleRequest) -> bool:
    """Whether a stop string ended the turn that is a part of the call it stands in."""
    if turn.completion.finish_reason != "stop" or not isinstance(turn.action, InvalidAction):
        return False
    return turn.action.unfinished and len(turn.completion.token_ids) < request.max_new_tokens


def _behind(completion: Completion, request: SampleRequest) -> SampleRequest:
    """What is left of a request, drawn with random numbers of its own."""
    num_tokens = len(completion.token_ids)
    return replace(
        request,
        context=completion.context,
        seed=derive_seed(request.seed, num_tokens),
        max_new_tokens=request.max_new_tokens - num_tokens,
    )


def _joined(completion: Completion, more: Completion) -> Completion:
    return replace(
        more,
        token_ids=completion.token_ids + more.token_ids,
        logprobs=completion.logprobs + more.logprobs,
    )


def _last_step(turn: _Turn, status: StepStatus, tool_calls: int = 0) -> Step:
    """The edge of a turn after which the path ends: sampled tokens only."""
    answer = None
    if status == "answered" and isinstance(turn.action, FinalAnswer):
        answer = turn.action.text
    memory: AgentMemory = turn.before.memory
    return Step(
        state=replace(
            turn.before,
            context=turn.completion.context,
            depth=turn.before.depth + 1,
            response=_join(turn.before.response, turn.text),
            answer=answer,
            memory=replace(memory, turns=(*memory.turns, turn.text)),
        ),
        token_ids=turn.completion.token_ids,
        loss_mask=(1,) * len(turn.completion.token_ids),
        logprobs=turn.completion.logprobs,
        terminal=True,
        status=status,
        tool_calls=tool_calls,
    )


def _join(response: str, text: str) -> str:
    """The policy's words so far and those of one more turn, a line break between turns."""
    return f"{response}\n{text}" if response else text


def _with(facts: tuple[str, ...], fact: str | None) -> tuple[str, ...]:
    return facts if fact is None or fact in facts else (*facts, fact)


def _union(found: tuple[Document, ...], new: tuple[Document, ...]) -> tuple[Document, ...]:
    """``found`` and the documents of ``new`` whose id is not yet in it, in order."""
    by_id = {document.id: document for document in found}
    for document in new:
        by_id.setdefault(document.id, document)
    return tuple(by_id.values())
