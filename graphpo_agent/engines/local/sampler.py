"""Batched sampling that continues from graph nodes without computing a prefix twice.

Every context is a node of a tree of token runs. The keys and values of computed tokens stay in
a pool until ``release``; a context knows the pool slots of its whole path and the tokens that
are still to be computed (a prompt, an observation, the last sampled token).

Shapes: B rows, L tokens of a run, P prefix columns, T columns, V vocabulary, d hidden size.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from graphpo_agent.engines.local.attention import attention
from graphpo_agent.engines.local.cache import BatchCache, KVPool, kv_bytes_per_token
from graphpo_agent.engines.local.contexts import (
    LocalContext,
    Node,
    Run,
    plan_rounds,
    similar_lengths,
)
from graphpo_agent.engines.local.decoding import Continuation, Transcript
from graphpo_agent.engines.local.drawing import StopFinder, draw
from graphpo_agent.engines.local.model import context_limit, output_head
from graphpo_agent.engines.local.packing import ranges
from graphpo_agent.protocols import Tokenizer
from graphpo_agent.types import Completion, Context, SampleRequest, SamplingParams

__all__ = ["LocalPolicy"]

_PREFILL_BLOCK = 1024
"""Tokens of one run computed in one forward pass; bounds the size of the attention mask."""
_PREFILL_TOKENS = 4096
"""Tokens of one prefill batch; larger batches leave the processor's caches and gain nothing."""
_COMPACT_SHARE = 0.3
"""Ended rows leave the decode batch once they are this share of it."""


class LocalPolicy:
    """The model as a sampler (``graphpo_agent.protocols.Policy``).

    Works with every transformers causal LM that follows the attention and cache interfaces.

    Example::

        policy = LocalPolicy(model, tokenizer)
        prompt = policy.open(tokenizer.encode("1 + 1 ="))
        requests = [SampleRequest(prompt, seed=s, max_new_tokens=8) for s in range(4)]
        completions = policy.sample(requests, SamplingParams())   # the prompt is computed once

    Attributes:
        tokenizer: as given.
        max_context_tokens: no context grows longer than this.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: Tokenizer, max_batch_bytes: int = 2**30
    ) -> None:
        """Args: the model, its tokenizer, and how many bytes of keys and values a batch holds."""
        self.tokenizer = tokenizer
        self.max_context_tokens = context_limit(model.config)
        self._model = model
        self._max_columns = max(1, max_batch_bytes // kv_bytes_per_token(model))
        self._pool = KVPool()
        self._head = output_head(model)
        self._stops = StopFinder(tokenizer, self._head.weight.shape[0])
        self._nodes: list[Node] = []
        self._prompts: dict[tuple[int, ...], int] = {}
        self._generation = 0
        self._prefilled_tokens = 0

    def open(self, token_ids: Sequence[int]) -> LocalContext:
        """A context that holds a prompt; equal prompts share one."""
        if not len(token_ids):
            raise ValueError("a prompt needs at least one token")
        key = tuple(map(int, token_ids))
        if key not in self._prompts:
            self._prompts[key] = len(self._nodes)
            self._nodes.append(Node(-1, key, False, len(key), np.empty(0, np.int64)))
        return self._handle(self._prompts[key])

    def extend(self, context: Context, token_ids: Sequence[int]) -> Context:
        """``context`` followed by tokens that the policy did not sample."""
        if not len(token_ids):
            return context
        parent = self._index(context)
        node = self._nodes[parent]
        slots = None if node.hidden is None else node.slots
        pending = tuple(map(int, token_ids))
        self._nodes.append(Node(parent, pending, False, node.num_tokens + len(pending), slots))
        return self._handle(len(self._nodes) - 1)

    @torch.inference_mode()
    def sample(
        self, requests: Sequence[SampleRequest], sampling: SamplingParams
    ) -> list[Completion]:
        """One completion per request, in order."""
        rows = [self._row(request) for request in requests]
        growing = [i for i, row in enumerate(rows) if row.max_new_tokens > 0]
        completions = [Completion((), (), "length", request.context) for request in requests]
        with attention(self._model, "graphpo_cached"):
            self._prefill({rows[i].node for i in growing})
            for batch in self._batches(growing, rows):
                for i, completion in zip(
                    batch, self._decode([rows[i] for i in batch], sampling), strict=True
                ):
                    completions[i] = completion
        return completions

    def take_prefilled_tokens(self) -> int:
        """Prompt and observation tokens computed since the last call."""
        count, self._prefilled_tokens = self._prefilled_tokens, 0
        return count

    def release(self) -> None:
        """Forget every context and free the pool."""
        self._nodes, self._prompts = [], {}
        self._generation += 1
        self._pool.clear()

    def _handle(self, index: int) -> LocalContext:
        return LocalContext(index, self._generation, self._nodes[index].num_tokens)

    def _slots(self, node: int) -> NDArray[np.int64]:
        slots = self._nodes[node].slots
        assert slots is not None, "the parent's round comes first"
        return slots

    def _index(self, context: Context) -> int:
        if not isinstance(context, LocalContext) or context.generation != self._generation:
            raise ValueError("this context was made by another policy or has been released")
        return context.index

    def _row(self, request: SampleRequest) -> Continuation:
        node = self._index(request.context)
        room = self.max_context_tokens - request.context.num_tokens
        return Continuation(
            node,
            request.context.num_tokens,
            request.seed,
            min(request.max_new_tokens, room),
            request.stop,
            request.min_new_tokens,
        )

    def _batches(self, growing: list[int], rows: list[Continuation]) -> list[list[int]]:
        """Split the rows, longest first, so that no batch holds too many columns."""
        ordered = sorted(growing, key=lambda i: -rows[i].num_tokens)
        longest = max((rows[i].max_new_tokens for i in growing), default=0)
        batches: list[list[int]] = []
        for i in ordered:
            if (
                batches
                and (len(batches[-1]) + 1) * (rows[batches[-1][0]].num_tokens + longest)
                <= self._max_columns
            ):
                batches[-1].append(i)
            else:
                batches.append([i])
        return batches

    # Computing prefixes

    def _prefill(self, targets: set[int]) -> None:
        for chains in plan_rounds(self._nodes, targets):
            runs = [self._run(chain) for chain in chains]
            for batch in similar_lengths(runs, self._max_columns, _PREFILL_TOKENS):
                self._compute(batch)

    def _run(self, chain: tuple[int, ...]) -> Run:
        head = self._nodes[chain[0]]
        prefix = self._slots(head.parent) if head.slots is None else head.slots
        tokens = tuple(token for i in chain for token in self._nodes[i].pending)
        return Run(chain, prefix, tokens)

    def _compute(self, runs: list[Run]) -> None:
        """Run the model over one batch of runs and settle their nodes."""
        lengths = np.array([len(run.token_ids) for run in runs])
        prefixes = np.array([len(run.prefix) for run in runs])
        cache, num_prefix = self._cache([run.prefix for run in runs], int(lengths.max()))
        hidden = self._forward_runs(runs, lengths, prefixes, cache)
        slots = self._pool.allocate(int(lengths.sum()))
        rows = np.repeat(np.arange(len(runs)), lengths)
        columns = num_prefix + ranges(lengths)
        cache.store(self._tensor(rows), self._tensor(columns), self._tensor(slots))
        for b, (run, own) in enumerate(
            zip(runs, np.split(slots, np.cumsum(lengths)[:-1]), strict=True)
        ):
            self._settle(run, own, hidden[b])

    def _forward_runs(
        self,
        runs: list[Run],
        lengths: NDArray[np.int64],
        prefixes: NDArray[np.int64],
        cache: BatchCache,
    ) -> Tensor:
        """[B, L, d] hidden states; runs are padded on the right."""
        longest, num_prefix = int(lengths.max()), int(prefixes.max())
        tokens = np.zeros((len(runs), longest), np.int64)
        for row, run in zip(tokens, runs, strict=True):
            row[: len(run.token_ids)] = run.token_ids
        positions = np.minimum(prefixes[:, None] + np.arange(longest), self.max_context_tokens - 1)
        blocks = []
        for start in range(0, longest, _PREFILL_BLOCK):
            end = min(start + _PREFILL_BLOCK, longest)
            blocks.append(
                self._forward(
                    self._tensor(tokens[:, start:end]),
                    self._tensor(positions[:, start:end]),
                    self._causal_mask(num_prefix - prefixes, num_prefix + start, end - start),
                    cache,
                )
            )
        return torch.cat(blocks, dim=1)

    def _settle(self, run: Run, own: NDArray[np.int64], hidden: Tensor) -> None:
        """Write down what is now known of the nodes of one run; ``hidden`` is [L, d]."""
        done = 0
        for index in run.nodes:
            node = self._nodes[index]
            done += len(node.pending)
            self._prefilled_tokens += 0 if node.sampled else len(node.pending)
            node.slots = np.concatenate([run.prefix, own[:done]])
            node.hidden = hidden[done - 1].clone()
            node.pending = ()

    # Decoding

    def _decode(self, rows: list[Continuation], sampling: SamplingParams) -> list[Completion]:
        """Draw one batch to its end."""
        transcript = Transcript(rows, self.tokenizer.eos_ids, self._stops)
        steps = transcript.token_ids.shape[1]
        starts = np.array([row.num_tokens for row in rows])
        cache, num_prefix = self._cache([self._slots(row.node) for row in rows], steps)
        mask = self._causal_mask(num_prefix - starts, num_prefix + steps - 1, 1)
        mask = mask.expand(len(rows), -1, -1, -1)
        logits = self._first_logits([row.node for row in rows])
        active = np.arange(len(rows))
        slots: dict[int, NDArray[np.int64]] = {}
        for step in range(steps):
            uniform = self._tensor(transcript.uniforms[active, step])
            tokens, logprobs = draw(logits, uniform, sampling)
            ended = transcript.record(step, active, tokens.cpu().numpy(), logprobs.cpu().numpy())
            if ended.all():
                break
            if ended.mean() >= _COMPACT_SHARE:
                slots |= self._store(cache, num_prefix, active, np.flatnonzero(ended), transcript)
                kept = np.flatnonzero(~ended)
                index = self._tensor(kept)
                cache.keep_rows(index)
                mask, tokens, active = mask[index], tokens[index], active[kept]
            positions = np.minimum(starts[active] + step, self.max_context_tokens - 1)
            columns = num_prefix + step + 1
            hidden = self._forward(
                tokens[:, None], self._tensor(positions[:, None]), mask[..., :columns], cache
            )
            logits = self._head(hidden[:, 0])
        slots |= self._store(cache, num_prefix, active, np.arange(len(active)), transcript)
        return [self._completion(row, r, slots[r], transcript) for r, row in enumerate(rows)]

    def _first_logits(self, nodes: list[int]) -> Tensor:
        """[B, V] logits after each row's prefix, computed once per distinct node."""
        distinct, inverse = np.unique(nodes, return_inverse=True)
        hidden = [self._nodes[i].hidden for i in distinct]
        logits = self._head(torch.stack([h for h in hidden if h is not None]))
        return logits[self._tensor(inverse)]

    def _store(
        self,
        cache: BatchCache,
        num_prefix: int,
        active: NDArray[np.int64],
        rows: NDArray[np.int64],
        transcript: Transcript,
    ) -> dict[int, NDArray[np.int64]]:
        """Move the ended batch rows' computed tokens (all but the last) to the pool.

        Returns:
            continuation → pool slots of its own computed tokens.
        """
        lengths = transcript.lengths[active[rows]] - 1
        slots = self._pool.allocate(int(lengths.sum()))
        if len(slots):
            columns = num_prefix + ranges(lengths)
            cache.store(
                self._tensor(np.repeat(rows, lengths)), self._tensor(columns), self._tensor(slots)
            )
        own = np.split(slots, np.cumsum(lengths)[:-1])
        return dict(zip(active[rows].tolist(), own, strict=True))

    def _completion(
        self, row: Continuation, r: int, own: NDArray[np.int64], transcript: Transcript
    ) -> Completion:
        length = int(transcript.lengths[r])
        token_ids = tuple(transcript.token_ids[r, :length].tolist())
        slots = np.concatenate([self._slots(row.node), own])
        self._nodes.append(Node(row.node, token_ids[-1:], True, row.num_tokens + length, slots))
        return Completion(
            token_ids,
            tuple(transcript.logprobs[r, :length].tolist()),
            transcript.reason(r),
            self._handle(len(self._nodes) - 1),
        )

    # The model

    def _forward(
        self, token_ids: Tensor, positions: Tensor, mask: Tensor, cache: BatchCache
    ) -> Tensor:
        """[B, L, d] last hidden states of new tokens [B, L], added to the cache."""
        return self._model.base_model(
            input_ids=token_ids,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state

    def _cache(self, prefixes: Sequence[NDArray[np.int64]], num_new: int) -> tuple[BatchCache, int]:
        """A cache of B rows with ``num_new`` columns behind the prefixes, and P."""
        num_prefix = max(map(len, prefixes))
        slots = np.zeros((len(prefixes), num_prefix), np.int64)
        for row, prefix in zip(slots, prefixes, strict=True):
            row[num_prefix - len(prefix) :] = prefix
        return BatchCache(self._pool, self._tensor(slots), num_prefix + num_new), num_prefix

    def _causal_mask(self, first: NDArray[np.int64], start: int, num_queries: int) -> Tensor:
        """[B, 1, Q, start + Q] additive: query i of row b sees columns first[b] … start + i.

        [1, 1, Q, start + Q] where that is the same for all rows.
        """
        first_seen = np.unique(first)
        if len(first_seen) > 1:
            first_seen = first
        start_column = self._tensor(first_seen)[:, None, None, None]
        columns = torch.arange(start + num_queries, device=self._model.device)
        hidden = (columns > columns[start:, None]) | (columns < start_column)
        mask = torch.zeros(hidden.shape, dtype=self._model.dtype, device=self._model.device)
        return mask.masked_fill_(hidden, -torch.inf)

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._model.device)
