"""Continuous batching over all prompts and layers; no prefix is computed twice.

One ``advance`` is one forward pass: it computes the last drawn token of every running
continuation, beside them what is still to be computed of the prefixes that are asked for, and
then draws the next token of each. A continuation that ends gives its place up at once.

Shapes: N tokens of a pass, R continuations that draw, V vocabulary, d hidden size.
"""

from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention import sdpa_kernel
from transformers import PreTrainedModel

from graphpo_agent.engines.local.arrays import to_device
from graphpo_agent.engines.local.attention import attention
from graphpo_agent.engines.local.cache import KVPool, pages_fit
from graphpo_agent.engines.local.cached_pass import CachedPass, Piece, next_pieces
from graphpo_agent.engines.local.cached_recurrence import CachedRecurrence, RowStates
from graphpo_agent.engines.local.contexts import ContextTree, LocalContext, Run
from graphpo_agent.engines.local.decoding import Continuation, Drawn, Running
from graphpo_agent.engines.local.drawing import StopFinder, check_finite, draw
from graphpo_agent.engines.local.head import output_head, sampling_logits
from graphpo_agent.engines.local.kernels import KERNELS
from graphpo_agent.engines.local.language_model import language_model
from graphpo_agent.engines.local.out_of_memory import within_memory
from graphpo_agent.engines.local.paged_rows import PagedRows
from graphpo_agent.engines.local.probe import kv_shape, state_shape
from graphpo_agent.engines.local.reach import context_limit
from graphpo_agent.engines.local.recorded_passes import RecordedPasses
from graphpo_agent.engines.local.running_rows import RunningRows
from graphpo_agent.engines.local.sampling_weights import SamplingWeights
from graphpo_agent.engines.local.shelves import Shelf, Shelves
from graphpo_agent.engines.local.state_pool import StatePool
from graphpo_agent.graph.arrays import IntArray
from graphpo_agent.protocols import Tokenizer
from graphpo_agent.types import Completion, Context, SampleRequest, SamplingParams

__all__ = ["LocalPolicy"]

_PREFILL_TOKENS = 4096
"""Prefix tokens of one pass; more leave the processor's caches and gain nothing."""
_DRAWN_AT_ONCE = 256
"""Rows whose logits are made together; bounds their memory."""


class LocalPolicy:
    """The model as a sampler (``graphpo_agent.protocols.Policy``).

    Works with every transformers causal LM that follows the attention interface.

    Example::

        policy = LocalPolicy(model, tokenizer)
        prompt = policy.open(tokenizer.encode("1 + 1 ="))
        for seed in range(4):   # the prompt is computed once
            policy.submit(SampleRequest(prompt, seed, max_new_tokens=8), SamplingParams())
        while not (ended := policy.advance()):
            ...

    Attributes:
        tokenizer: as given.
        max_context_tokens: no context grows longer than this.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer,
        max_batch_bytes: int = 2**30,
        autocast: bool = False,
    ) -> None:
        """Set up.

        Args:
            model: the weights; they may change between rollouts.
            tokenizer: the model's.
            max_batch_bytes: keys and values that the rows of running continuations hold beside the
                pool's; one runs whatever it takes.
            autocast: multiply float32 weights in bfloat16.

        Raises:
            ModelError: the model is more than plain attention layers that are alike.
        """
        self.tokenizer = tokenizer
        self.max_context_tokens = context_limit(model.config.get_text_config())
        self._model, self._layers = model, language_model(model)
        self._head = output_head(model)
        self._autocast = (
            torch.autocast(model.device.type, torch.bfloat16) if autocast else nullcontext()
        )
        self._rounds = autocast
        self._copies: SamplingWeights | None = None
        with self._autocast:
            self._shape = kv_shape(model)
            self._states = StatePool(state_shape(model))
        records = model.device.type == "cuda" and not self._states.needed
        self._recorded = RecordedPasses(self._decode) if records else None
        self._max_columns = max_batch_bytes // self._shape.bytes_per_token
        self._stops = StopFinder(tokenizer, self._head.weight.shape[0])
        self._contexts = ContextTree(cuts_compute=self._states.needed)
        paged = pages_fit(self._shape.device, self._shape.dtype)
        self._pool = KVPool(self._shape, by_layer=paged)
        self._rows: RunningRows = (
            PagedRows(self._pool) if paged else Shelves(self._shape, self._pool, self._max_columns)
        )
        # Four dimensions tell transformers not to make or look for a mask of its own.
        self._no_mask = torch.empty((1, 1, 0, 0), device=model.device)
        self._attention = ExitStack()
        self._tickets = self._prefilled_tokens = 0
        self._reset()

    def open(self, token_ids: Sequence[int]) -> LocalContext:
        """A context that holds a prompt; what prompts begin with alike is computed once."""
        if not len(token_ids):
            raise ValueError("a prompt needs at least one token")
        return self._contexts.open(token_ids)

    def extend(self, context: Context, token_ids: Sequence[int]) -> Context:
        """``context`` followed by tokens that the policy did not sample.

        The same tokens behind the same context again are not computed again.
        """
        if not len(token_ids):
            return context
        return self._contexts.extend(self._contexts.index(context), token_ids)

    def cut(self, context: Context, num_tokens: int, last: int) -> Context:
        """The first tokens of a context, which end inside tokens that the policy sampled."""
        if num_tokens == context.num_tokens:
            return context
        return self._contexts.cut(self._contexts.index(context), num_tokens, last)

    def submit(self, request: SampleRequest, sampling: SamplingParams) -> int:
        """Queue one continuation and return its ticket; nothing is computed yet."""
        self._tickets += 1
        room = self.max_context_tokens - request.context.num_tokens
        continuation = Continuation(
            self._tickets,
            self._contexts.index(request.context),
            request.context.num_tokens,
            request.seed,
            max(0, min(request.max_new_tokens, room)),
            request.stop,
            request.min_new_tokens,
            sampling,
        )
        if continuation.max_new_tokens:
            self._waiting.append(continuation)
        else:
            completion = Completion((), (), "length", request.context)
            self._ended.append((self._tickets, completion))
        return self._tickets

    @torch.inference_mode()
    @within_memory("sampling", "lower engine.max_batch_gib, or train.prompts_per_step")
    def advance(self) -> list[tuple[int, Completion]]:
        """One forward pass, one more token of every running continuation; what ended.

        Raises:
            ModelError: the logits are not finite, or memory ran out.
        """
        self._admit()
        if self._columns:
            if not self._busy:
                self._get_busy()
            with self._autocast:
                places, hidden = self._compute()
                if self._starting:
                    started, started_hidden = self._start()
                    places = np.concatenate([places, started])
                    hidden = torch.cat([hidden, started_hidden])
                if len(places):
                    self._draw(places, hidden)
        if self._busy and not self._columns:
            self.rest()
        ended, self._ended = self._ended, []
        return ended

    def take_prefilled_tokens(self) -> int:
        """Prompt and observation tokens computed since the last call."""
        count, self._prefilled_tokens = self._prefilled_tokens, 0
        return count

    def rest(self) -> None:
        """Give the model its own attention and weights back until the next pass."""
        self._attention.close()
        self._busy = False

    def release(self) -> None:
        """Forget every context and unfinished continuation, and free their memory."""
        self.rest()
        self._copies = None
        if self._recorded is not None:
            self._recorded.clear()
        self._contexts.clear()
        self._pool.clear()
        self._states.clear()
        self._rows.clear()
        self._reset()

    def _reset(self) -> None:
        self._busy = False
        self._columns = 0
        self._waiting: deque[Continuation] = deque()
        self._starting: list[Continuation] = []
        self._runs: list[Run] = []
        self._running = Running(self.tokenizer.eos_ids, self._stops)
        self._row_states = RowStates(self._states)
        self._ended: list[tuple[int, Completion]] = []

    def _get_busy(self) -> None:
        """Give the model the attention and the weights that it samples with."""
        self._attention.enter_context(attention(self._model, "graphpo_cached"))
        self._attention.enter_context(sdpa_kernel(KERNELS))
        if self._copies is None:
            reached = [*self._layers.modules(), self._head.layer]
            self._copies = SamplingWeights(reached, self._rounds)
        self._attention.enter_context(self._copies.in_place())
        self._busy = True

    # Before the pass: who gets a place, and what is to be computed for them

    def _admit(self) -> None:
        """Give places to waiting continuations, first come, first served."""
        while self._waiting:
            columns = self._columns_of(self._waiting[0])
            if self._columns and self._columns + columns > self._max_columns:
                break
            self._columns += columns
            self._starting.append(self._waiting.popleft())
        for node in dict.fromkeys(one.node for one in self._starting):
            chain = self._contexts.uncomputed(node)
            if chain:
                slots, states = self._pool.allocate, self._states.allocate
                self._runs.append(self._contexts.start_run(chain, slots, states))

    # The pass

    def _compute(self) -> tuple[IntArray, Tensor]:
        """Compute the last token of every row and the next tokens of the runs.

        Returns:
            [R] places of the continuations that have a row, and their [R, d] hidden states.
        """
        rows = self._rows
        pieces = next_pieces(self._runs, _PREFILL_TOKENS)
        rows.begin()
        running = rows.members
        if self._recorded and self._recorded.come_first(len(running), len(self._starting)):
            pieces = []
        if not len(running) and not pieces:
            return running, self._head.weight[:0]
        if self._recorded is not None and not pieces:
            assert isinstance(rows, Shelves), "what is recorded stays in its place"
            last = [self._running.last[shelf.members] for shelf in rows.in_use]
            return running, torch.cat(list(map(self._recorded.hidden, rows.in_use, last)))
        rows.look()
        tokens = [piece.run.token_ids[piece.start : piece.end] for piece in pieces]
        positions = [
            np.arange(piece.num_keys - len(own), piece.num_keys)
            for piece, own in zip(pieces, tokens, strict=True)
        ]
        hidden = self._hidden(
            self._tensor(np.concatenate([self._running.last[running], *tokens])),
            self._tensor(np.concatenate([rows.lengths - 1, *positions])),
            CachedPass(self._pool, rows, pieces),
            self._recurrence(running, pieces),
        )
        self._settle(pieces, hidden[len(running) :])
        return running, hidden[: len(running)]

    def _decode(self, shelf: Shelf, inputs: Tensor, num_columns: int) -> Tensor:
        """A pass over one shelf: [P, d] hidden states of [2, P] tokens and columns."""
        tokens, last = inputs
        shelf.look(last, num_columns)
        return self._hidden(tokens, last, CachedPass(self._pool, shelf, []), None)

    def _recurrence(self, running: IntArray, pieces: Sequence[Piece]) -> CachedRecurrence | None:
        """For the linear layers of a pass; None where there are none."""
        if not self._states.needed:
            return None
        return CachedRecurrence(self._states, *self._row_states.begin(running), pieces)

    def _hidden(
        self,
        token_ids: Tensor,
        position_ids: Tensor,
        cached_pass: CachedPass,
        recurrence: CachedRecurrence | None,
    ) -> Tensor:
        """[N, d] of N tokens and their places in their contexts."""
        return self._layers(
            input_ids=token_ids[None],
            position_ids=position_ids[None],
            attention_mask=self._no_mask,
            use_cache=False,
            cached_pass=cached_pass,
            recurrence=recurrence,
        ).last_hidden_state[0]

    def _settle(self, pieces: Sequence[Piece], hidden: Tensor) -> None:
        """Write down what is now known of the nodes of the runs; ``hidden`` is [M, d]."""
        settled: list[tuple[int, IntArray]] = []
        last: list[int] = []
        start = 0
        for piece in pieces:
            run = piece.run
            for index, end in zip(run.nodes, run.ends, strict=True):
                if piece.start < end <= piece.end:
                    node = self._contexts[index]
                    self._prefilled_tokens += 0 if node.sampled else len(node.pending)
                    settled.append((index, run.slots[: run.num_before + end]))
                    last.append(start + end - piece.start - 1)
            run.done = max(run.done, piece.end)
            start += piece.num_queries
        if settled:
            self._contexts.settle(settled, hidden[self._tensor(np.array(last))])
        self._runs = [run for run in self._runs if run.done < len(run.token_ids)]

    def _start(self) -> tuple[IntArray, Tensor]:
        """Give rows to the continuations whose prefix is computed by now.

        Returns:
            [R] their places and the [R, d] hidden states of their prefixes.
        """
        waiting: list[Continuation] = []
        ready: list[Continuation] = []
        for one in self._starting:
            (waiting if self._contexts[one.node].state is None else ready).append(one)
        self._starting = waiting
        if not ready:
            return np.empty(0, np.int64), self._head.weight[:0]
        places = np.array([self._running.add(one) for one in ready])
        self._row_states.add(places, [self._contexts[one.node].memory for one in ready])
        columns = np.array([self._columns_of(one) for one in ready])
        self._rows.add(places, [self._slots(one.node) for one in ready], columns)
        return places, self._contexts.hidden([one.node for one in ready])

    def _columns_of(self, one: Continuation) -> int:
        return self._rows.columns(one.num_tokens, one.max_new_tokens)

    # After the pass: one token more for each

    def _draw(self, places: IntArray, hidden: Tensor) -> None:
        """Draw the next token of R continuations from their [R, d] hidden states."""
        uniform = self._tensor(self._running.uniforms(places))
        kinds = self._running.kinds[places]
        tokens, logprobs = np.empty(len(places), np.int64), np.empty(len(places))
        for kind, sampling in enumerate(self._running.samplings):
            members = np.flatnonzero(kinds == kind)
            for start in range(0, len(members), _DRAWN_AT_ONCE):
                part = members[start : start + _DRAWN_AT_ONCE]
                first, end = int(part[0]), int(part[-1]) + 1
                rows = slice(first, end) if end - first == len(part) else self._tensor(part)
                logits = sampling_logits(self._head, hidden[rows])
                drawn = draw(logits, uniform[rows], sampling)
                tokens[part], logprobs[part] = (x.cpu().numpy() for x in drawn)
        check_finite(logprobs, self._model.name_or_path)
        if self._running.record(places, tokens, logprobs):
            self._finish()

    def _finish(self) -> None:
        """Free the rows of the ended continuations; what they have computed stays in the pool."""
        members = self._rows.members
        ended = self._running.ended[members]
        for place, own in zip(members[ended].tolist(), self._rows.end(ended), strict=True):
            drawn = self._running.take(place)
            self._columns -= self._columns_of(drawn.continuation)
            memory = self._row_states.own(place)
            self._ended.append((drawn.continuation.ticket, self._completion(drawn, own, memory)))

    def _completion(self, drawn: Drawn, own: IntArray, memory: int) -> Completion:
        tokens = drawn.token_ids
        context = self._contexts.add_sampled(drawn.continuation.node, tokens, own, memory)
        return Completion(tokens, drawn.logprobs, drawn.reason, context)

    def _slots(self, node: int) -> IntArray:
        slots = self._contexts[node].slots
        assert slots is not None, "the node is computed"
        return slots

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return to_device(array, self._shape.device)
