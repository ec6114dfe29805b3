"""Random training samples, and the slow oracle that trains them one row per edge."""

import itertools
from dataclasses import replace

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from graphpo_agent.engines.local.lora import LoraOptions, add_adapters
from graphpo_agent.engines.local.pieces import cut_into_buckets
from graphpo_agent.engines.local.saved import saved_bytes
from graphpo_agent.engines.local.stretch_attention import stretch_layout
from graphpo_agent.graph.samples import TrainingSample


def random_sample(seed, num_nodes=12, vocab_size=300, terms=1, prompt=5, longest=7):
    """A ragged graph: any shape of tree, observation tokens masked, one edge all observation."""
    rng = np.random.default_rng(seed)
    parent = np.array([-1, *(int(rng.integers(0, v)) for v in range(1, num_nodes))])
    lengths = np.array([prompt, *rng.integers(1, longest + 1, num_nodes - 1)])
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    num_tokens = int(offsets[-1])
    mask = rng.random(num_tokens) < 0.8
    mask[:prompt] = False
    mask[offsets[2] : offsets[3]] = False
    mask[offsets[1]] = True
    advantages = rng.normal(size=(terms, num_nodes))
    advantages[:, 3] = 0.0
    advantages[:, 0] = np.nan
    return TrainingSample(
        graph_id=f"g{seed}",
        parent=parent,
        offsets=offsets,
        token_ids=rng.integers(3, vocab_size, num_tokens),
        loss_mask=mask,
        logprobs=np.where(mask, 0.0, np.nan).astype(np.float32),
        advantages=advantages,
    )


def tree_sample(schedule, segment, prompt):
    """A whole tree: so many children in each layer, edges of ``segment`` tokens, all trained."""
    parent, layer = [-1], [0]
    for branches in schedule:
        layer = [parent.append(v) or len(parent) - 1 for v in layer for _ in range(branches)]
    offsets = np.cumsum([0, prompt, *[segment] * (len(parent) - 1)])
    num_tokens = int(offsets[-1])
    mask = np.arange(num_tokens) >= prompt
    ids = np.random.default_rng(0).integers(3, 300, num_tokens)
    advantages = np.ones((1, len(parent)))
    return TrainingSample(
        "tree", np.array(parent), offsets, ids, mask, np.zeros(num_tokens, np.float32), advantages
    )


def partly_idle(sample, seed):
    """The sample with an advantage of 0 on half of its edges, and on half of its rows."""
    rng = np.random.default_rng(seed)
    half = np.where(rng.random(len(sample.parent)) < 0.5, 0.0, 1.0)
    of_rows = sample.row_advantages
    if of_rows is not None:
        of_rows = np.where(np.arange(len(of_rows)) % 2, of_rows, 0.0)
    return replace(sample, advantages=sample.advantages * half, row_advantages=of_rows)


def with_instructions(sample, token_ids):
    """The sample with more tokens at the beginning of its prompt."""
    count = len(token_ids)
    return replace(
        sample,
        offsets=np.where(np.arange(len(sample.offsets)) > 0, sample.offsets + count, 0),
        token_ids=np.array([*token_ids, *sample.token_ids]),
        loss_mask=np.array([*[False] * count, *sample.loss_mask]),
        logprobs=np.array([*[np.nan] * count, *sample.logprobs], np.float32),
    )


def path_tokens(sample, node):
    """Token ids of the ancestors of ``node``, then its own."""
    own = sample.token_ids[sample.offsets[node] : sample.offsets[node + 1]].tolist()
    above = int(sample.parent[node])
    return (path_tokens(sample, above) if above >= 0 else []) + own


def edge_logprobs(model, sample, node, temperature=1.0):
    """[trained tokens of the edge] log-probabilities and entropies from a row of its own."""
    path = path_tokens(sample, node)
    own = int(sample.offsets[node + 1] - sample.offsets[node])
    logits = model(torch.tensor([path], device=model.device), use_cache=False).logits[
        0, -own - 1 : -1
    ]
    distribution = (logits / temperature).log_softmax(-1)
    mask = torch.tensor(sample.loss_mask[sample.offsets[node] : sample.offsets[node + 1]])
    picked = distribution[torch.arange(own), torch.tensor(path[-own:])]
    entropy = -(distribution.exp() * distribution).sum(-1)
    return picked[mask.to(model.device)], entropy[mask.to(model.device)]


def with_rollout_logprobs(model, sample, noise, seed=0, temperature=1.0):
    """The sample as if it had been drawn by a policy ``noise`` away from the model."""
    rng = np.random.default_rng(seed)
    logprobs = np.full(len(sample.token_ids), np.nan, np.float32)
    for node in range(1, len(sample.parent)):
        span = np.arange(sample.offsets[node], sample.offsets[node + 1])
        with torch.no_grad():
            exact, _ = edge_logprobs(model, sample, node, temperature)
        drift = noise * rng.normal(size=len(exact))
        logprobs[span[sample.loss_mask[span]]] = exact.float().cpu().numpy() + drift
    return replace(sample, logprobs=logprobs)


def visible_places(batch, window=None):
    """For each place of a packed row the places that it sees, read off the buckets."""
    seen = {}
    for bucket in cut_into_buckets(batch, window)[0]:
        causal = np.tri(bucket.queries.shape[1], dtype=bool)
        masks = [causal] * len(bucket.keys) if bucket.causal else bucket.seen(batch)
        for row, keys, mask, own in zip(
            bucket.queries, bucket.keys, masks, bucket.own(), strict=True
        ):
            for place, visible in zip(row[own].tolist(), mask[own], strict=True):
                assert place not in seen
                seen[place] = keys[visible].tolist()
    return seen


def places_on_stretches(batch):
    """The same, read off the stretches."""
    layout = stretch_layout(batch, torch.device("cpu"))
    keys, queries = layout.keys.tolist(), range(len(batch.token_ids))
    seen, longest = {}, [0, 0]
    for (start, end), (first, last) in zip(
        pairs(layout.query_ends), pairs(layout.key_ends), strict=True
    ):
        longest = [max(longest[0], end - start), max(longest[1], last - first)]
        seen |= {place: keys[first : last - (end - 1 - place)] for place in queries[start:end]}
    assert longest == [layout.longest_stretch, layout.longest_path]
    return seen


def pairs(ends):
    return list(itertools.pairwise(ends.tolist()))


def use_slow_flash_attention(monkeypatch):
    """In the place of the kernel, which there is none of on a CPU."""
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", slow_flash_attention)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", slow_flash_attention_backward)


def slow_flash_attention(
    queries,
    keys,
    values,
    query_ends,
    key_ends,
    longest_stretch,
    longest_path,
    *,
    dropout_p,
    return_debug_mask,
    **kernel,
):
    """What the kernel of that name computes, sequence by sequence."""
    assert not dropout_p and not return_debug_mask
    parts, sums = [], []
    for own, path in zip(pairs(query_ends), pairs(key_ends), strict=True):
        assert own[1] - own[0] <= longest_stretch and path[1] - path[0] <= longest_path
        scores, _, _, v = scores_of(queries, keys, values, own, path, **kernel)
        parts.append((scores.softmax(-1) @ v).transpose(0, 1))
        sums.append(scores.logsumexp(-1))
    nothing = torch.empty(0)
    return torch.cat(parts), torch.cat(sums, 1), nothing, nothing, nothing


def scores_of(
    queries,
    keys,
    values,
    own,
    path,
    *,
    scale,
    is_causal,
    window_size_left=-1,
    window_size_right=-1,
):
    """[H, Q, T] scores of one sequence, -inf where nothing is seen, and [H, ., D] of all heads."""
    assert (is_causal, window_size_right) == ((True, -1) if window_size_left < 0 else (False, 0))
    q = queries[slice(*own)].transpose(0, 1)
    k, v = (x[slice(*path)].transpose(0, 1) for x in (keys, values))
    k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
    ahead = k.shape[1] - q.shape[1]
    seen = torch.ones(q.shape[1], k.shape[1]).tril(ahead)
    if window_size_left >= 0:
        seen = seen.triu(ahead - window_size_left)
    return (scale * q @ k.transpose(1, 2)).masked_fill(seen == 0, -torch.inf), q, k, v


def slow_flash_attention_backward(
    gradient,
    queries,
    keys,
    values,
    out,
    logsumexp,
    query_ends,
    key_ends,
    *_,
    dropout_p,
    rng_state,
    unused,
    scale,
    **kernel,
):
    """What the kernel computes: weights anew from scores and logsumexp, and the output as given."""
    found = [torch.zeros_like(x) for x in (queries, keys, values)]
    for own, path in zip(pairs(query_ends), pairs(key_ends), strict=True):
        scores, q, k, v = scores_of(queries, keys, values, own, path, scale=scale, **kernel)
        weights = (scores - logsumexp[:, slice(*own), None]).exp()
        g, o = (x[slice(*own)].transpose(0, 1) for x in (gradient, out))
        of_scores = weights * (g @ v.transpose(1, 2) - (g * o).sum(-1, keepdim=True))
        parts = (
            scale * of_scores @ k,
            scale * of_scores.transpose(1, 2) @ q,
            weights.transpose(1, 2) @ g,
        )
        for total, part, place in zip(found, parts, (own, path, path), strict=True):
            heads = part.unflatten(0, (total.shape[1], -1)).sum(1)
            total[slice(*place)] += heads.transpose(0, 1)
    return tuple(found)


def counted_bytes(config, batch, compute, adapters=False, dtype=torch.float32):
    """What a forward pass keeps for the backward pass, as it is told before a run."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if adapters:
        add_adapters(model, LoraOptions(4, 8.0))
    return saved_bytes(model, batch, compute, torch.device("cpu"))
