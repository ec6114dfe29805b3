"""Segment mode: an edge is a fixed number of sampled tokens (Algorithm 1, segment length L)."""

from collections.abc import Sequence
from dataclasses import replace

from graphpo_agent.protocols import Policy, PromptOpener, Scheduler
from graphpo_agent.rollout.path import (
    behind_prefix,
    check_template,
    fill_template,
    limited,
    open_path,
    out_of_budget,
    room_left,
    text_behind,
)
from graphpo_agent.types import (
    NO_PREFIX,
    Completion,
    Context,
    Message,
    Outcome,
    PathState,
    Prefix,
    SampleRequest,
    SamplingParams,
    Step,
    StepStatus,
    Task,
)

__all__ = ["SegmentExpander"]


class SegmentExpander:
    """Grows a graph of reasoning by segments; an ``Expander``.

    A segment is ``segment_length`` sampled tokens. It ends earlier at the end-of-sequence token
    (terminal, ``answered``) or at the response or context limit (terminal, ``out_of_length``; the
    verifier judges what is there). With a delimiter it goes on to the first token that completes
    the delimiter at or after ``segment_length`` tokens, at most ``2 * segment_length``.

    A path's ``memory`` is the tuple of its sampled token ids, from which its text is decoded: a
    character whose bytes are split over two segments comes out right.

    Example with ``segment_length=3, max_response_tokens=7`` and no delimiter::

        max_layers = 3, edges of 3, 3 and 1 tokens, the last one terminal with ``out_of_length``

    Attributes:
        max_layers: ⌈max_response_tokens / segment_length⌉, which no path can outgrow but by cuts.
        edge_tokens: ``segment_length``, twice that with a delimiter.
        path_tokens: ``max_response_tokens``.
    """

    def __init__(
        self,
        *,
        segment_length: int,
        max_response_tokens: int,
        delimiter: str | None = None,
        prompt_template: str = "{question}",
        system_prompt: str | None = None,
    ) -> None:
        """Set the limits and the prompt.

        Args:
            segment_length: sampled tokens of an edge.
            max_response_tokens: sampled tokens of a path.
            delimiter: where segments may end, such as a line break; None: anywhere.
            prompt_template: the user message, with ``{question}`` in it.
            system_prompt: the system message; None leaves it to the chat template.

        Raises:
            ConfigError: the template has no ``{question}``.
        """
        self.max_layers = -(-max_response_tokens // segment_length)
        self.edge_tokens = segment_length * (1 if delimiter is None else 2)
        self.path_tokens = max_response_tokens
        self._segment_length = segment_length
        self._max_response_tokens = max_response_tokens
        self._delimiter = delimiter
        self._prompt_template = check_template(prompt_template)
        self._system_prompt = system_prompt

    def start(self, policy: PromptOpener, task: Task, prefix: Prefix = NO_PREFIX) -> PathState:
        """The root: the task's question in the prompt template, as one user message.

        A prefix counts as the beginning of the response, which the verifier reads as a whole.

        Raises:
            DataError: the prompt does not fit into the policy's context, or the prefix into the
                response.
        """
        content = fill_template(self._prompt_template, task.question)
        messages: list[Message] = [{"role": "user", "content": content}]
        if self._system_prompt is not None:
            messages.insert(0, {"role": "system", "content": self._system_prompt})
        state = open_path(policy, task, messages, memory=())
        if not prefix.token_ids:
            return state
        begun = behind_prefix(policy, state, prefix, self._max_response_tokens)
        response = policy.tokenizer.decode(prefix.token_ids)
        return replace(begun, response=response, memory=prefix.token_ids)

    def tokens_left(self, policy: Policy, state: PathState) -> int:
        """The room left in the response and in the context."""
        return self._room(policy, state, state.context)

    def recall(self, state: PathState) -> None:
        """Nothing: the tokens say it all."""

    async def expand(
        self,
        scheduler: Scheduler,
        states: Sequence[PathState],
        seeds: Sequence[int],
        sampling: SamplingParams,
        limit: int | None = None,
    ) -> list[Step]:
        """One segment behind each state."""
        policy = scheduler.policy
        requests = [
            limited(self._request(policy, state, seed), limit)
            for state, seed in zip(states, seeds, strict=True)
        ]
        completions = await scheduler.sample(requests, sampling)
        return [
            self._step(policy, state, completion, limit)
            for state, completion in zip(states, completions, strict=True)
        ]

    def cut(
        self, policy: Policy, before: PathState, after: PathState, num_tokens: int
    ) -> PathState:
        """The state after ``num_tokens`` of a segment."""
        token_ids = after.memory[: len(before.memory) + num_tokens]
        length = before.context.num_tokens + num_tokens
        return replace(
            before,
            context=policy.cut(after.context, length, token_ids[-1]),
            depth=before.depth + 1,
            response=policy.tokenizer.decode(token_ids),
            memory=token_ids,
        )

    def outcome(self, state: PathState) -> Outcome:
        """The response as a whole; the mode marks no answer in it."""
        return Outcome(state.response)

    def _room(self, policy: Policy, path: PathState, context: Context) -> int:
        return room_left(path, context, self._max_response_tokens, policy.max_context_tokens)

    def _full_length(self, policy: Policy, state: PathState) -> int:
        """Tokens of a segment that nothing ends earlier."""
        return min(self.edge_tokens, self._room(policy, state, state.context))

    def _request(self, policy: Policy, state: PathState, seed: int) -> SampleRequest:
        full = self._full_length(policy, state)
        if self._delimiter is None:
            return SampleRequest(state.context, seed, full)
        return SampleRequest(
            state.context,
            seed,
            max_new_tokens=full,
            stop=(self._delimiter,),
            min_new_tokens=self._segment_length,
        )

    def _step(
        self, policy: Policy, state: PathState, completion: Completion, limit: int | None
    ) -> Step:
        token_ids = (*state.memory, *completion.token_ids)
        status: StepStatus = "ok"
        if completion.finish_reason == "eos":
            status = "answered"
        elif self._room(policy, state, completion.context) < 1:
            status = "out_of_length"
        elif out_of_budget(completion, limit, self._full_length(policy, state)):
            status = "out_of_budget"
        reached = replace(
            state,
            context=completion.context,
            depth=state.depth + 1,
            response=text_behind(
                policy.tokenizer, state.response, token_ids, start=len(state.memory)
            ),
            memory=token_ids,
        )
        return Step(
            state=reached,
            token_ids=completion.token_ids,
            loss_mask=(1,) * len(completion.token_ids),
            logprobs=completion.logprobs,
            terminal=status != "ok",
            status=status,
        )
