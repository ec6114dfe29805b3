"""What a configuration will need of the machine's memory, before anything is loaded."""

import numpy as np
import torch

from graphpo_agent.build import compute_options, device_of, gib, model_in_outline
from graphpo_agent.config import (
    BudgetConfig,
    LocalEngineConfig,
    RunConfig,
    SegmentMode,
    VerlEngineConfig,
    VllmEngineConfig,
)
from graphpo_agent.config_methods import (
    DapoMethod,
    GraphPOMethod,
    GrpoMethod,
    MethodConfig,
    OwnMethod,
    PrmMethod,
    ProsMethod,
    SpoChainMethod,
    TreeGrpoMethod,
    TreePOMethod,
    TreeRLMethod,
)
from graphpo_agent.config_state import SummaryState
from graphpo_agent.engines.local.cache import PAGE, pages_fit
from graphpo_agent.engines.local.linear_attention import state_bytes
from graphpo_agent.engines.local.memory import (
    MemoryEstimate,
    UpdateSizes,
    estimate_memory,
    model_sizes,
    product_bytes,
    token_bytes,
)
from graphpo_agent.engines.local.model import model_config, usable_device
from graphpo_agent.engines.local.packing import PackedBatch, pack
from graphpo_agent.engines.local.parts import row_limit
from graphpo_agent.engines.local.reach import context_limit
from graphpo_agent.engines.local.saved import saved_bytes
from graphpo_agent.engines.local.shelves import shelf_capacity
from graphpo_agent.engines.minibatches import num_minibatches
from graphpo_agent.engines.tokenizer import HfTokenizer
from graphpo_agent.errors import first_line
from graphpo_agent.graph.budget import branching_at
from graphpo_agent.graph.samples import TrainingSample
from graphpo_agent.machine import free_memory
from graphpo_agent.rollout.grow import TASKS_AT_ONCE
from graphpo_agent.rollout.summarize import SUMMARY_REQUEST

__all__ = ["describe_budget", "describe_memory", "memory_of"]

_CHAINS = (DapoMethod, GrpoMethod, PrmMethod, ProsMethod)
_SHORT_TURN = 32
"""Sampled tokens of a turn that the estimate of observations reckons with, if not fewer."""
_MUCH = 4
"""Paths end long before their limit as a rule; a structure is too large from here on."""


def describe_budget(config: RunConfig) -> list[str]:
    """A line where a method's structure is far too large for its prompt's budget.

    Chains are not meant: no more of them begin than can end.
    """
    tokens, trajectories, method = config.budget.tokens, config.budget.trajectories, config.method
    if isinstance(method, _CHAINS):
        return []
    sampled, _ = _edge_tokens(config)
    edges, paths = _most_edges(config.model_copy(update={"budget": BudgetConfig()}))
    if trajectories is not None and paths > _MUCH * trajectories:
        return [
            f"budget: {method.name} as configured makes up to {paths:,} paths a prompt, and "
            f"budget.trajectories is {trajectories:,}: most of its branches are not made; make it "
            "smaller or the budget larger"
        ]
    wanted = min(edges * sampled, paths * config.mode.max_response_tokens)
    if tokens is None or wanted <= _MUCH * tokens:
        return []
    return [
        f"budget: {method.name} as configured makes up to {paths:,} paths and {wanted:,} tokens a "
        f"prompt, and budget.tokens is {tokens:,}: most paths may be cut before they end; make it "
        "smaller or the budget larger"
    ]


def describe_memory(config: RunConfig, prompt_tokens: int) -> list[str]:
    """A few lines: the memory that training needs, whether it is there, and if it could use more.

    Args:
        config: the run.
        prompt_tokens: as in ``memory_of``.

    Raises:
        ModelError: there is no model.
    """
    device, config = usable_device(device_of(config.model)), _within_context(config)
    try:
        lines = _estimate(config, prompt_tokens).lines(_free_bytes(device), device.type)
    except RuntimeError as error:
        lines = [f"memory: what the update of this model keeps is not known: {first_line(error)}"]
    return [*lines, *_describe_rows(config, prompt_tokens)]


def _free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory()


def _within_context(config: RunConfig) -> RunConfig:
    """The run with no longer answers than the model's contexts hold."""
    reach = context_limit(model_config(config.model.path))
    longest = min(config.mode.max_response_tokens, reach)
    mode = config.mode.model_copy(update={"max_response_tokens": longest})
    return config.model_copy(update={"mode": mode})


def _describe_rows(config: RunConfig, prompt_tokens: int) -> list[str]:
    """A line where the rows of the update are mostly filled with what other rows hold as well."""
    limit = config.update.max_tokens_per_batch
    path = prompt_tokens + max(1, config.mode.max_response_tokens // 2)  # before a learned token
    row = _row_tokens(config, prompt_tokens)
    alike = prompt_tokens if isinstance(config.method, _CHAINS) else path
    if row >= min(2 * alike, prompt_tokens + _graph_tokens(config)):
        return []
    return [
        f"memory: rows of {row:,} tokens (update.max_tokens_per_batch is {limit:,}) hold few paths "
        f"of about {path:,} tokens: most of each is computed again for the next row; longer rows "
        "are faster where they fit"
    ]


def _row_tokens(config: RunConfig, prompt_tokens: int) -> int:
    """Of the longest row of the update."""
    longest = prompt_tokens + config.mode.max_response_tokens
    return row_limit(config.update.max_tokens_per_batch, longest)


def _row(config: RunConfig, prompt_tokens: int) -> PackedBatch:
    """The fullest row of the update, if every edge of every graph is at its limit."""
    mode, edge = config.mode, sum(_edge_tokens(config))
    path = mode.max_response_tokens
    if not isinstance(mode, SegmentMode):
        path = min(path, mode.max_turns * edge)
    schedule, limit = _schedule(config.method, path), _row_tokens(config, prompt_tokens)
    parent, ends = [-1], [max(1, prompt_tokens)]
    to_come = [(0, 1, path)] * min(limit, branching_at(schedule, 1))
    while to_come and ends[-1] < limit:  # depth first
        above, layer, left = to_come.pop()
        if left > edge:
            below = (len(parent), layer + 1, left - edge)
            to_come += [below] * min(limit, branching_at(schedule, layer + 1))
        parent.append(above)
        ends.append(ends[-1] + min(edge, left))
    graphs = min(_graphs_of_an_optimizer_step(config), -(-limit // ends[-1]))
    tokens = np.arange(graphs * ends[-1]).reshape(graphs, -1)  # nothing begins alike by chance
    samples = [
        TrainingSample(
            graph_id="one of the largest",
            parent=np.array(parent),
            offsets=np.array([0, *ends]),
            token_ids=own,
            loss_mask=np.arange(ends[-1]) >= ends[0],
            logprobs=np.zeros(ends[-1], np.float32),
            advantages=np.ones((1, len(parent))),
        )
        for own in tokens
    ]
    return max(pack(samples, limit), key=lambda row: len(row.token_ids))


def _graphs_of_an_optimizer_step(config: RunConfig) -> int:
    """At most so many."""
    graphs = config.train.prompts_per_step
    return -(-graphs // num_minibatches(graphs, config.update.minibatch_graphs))


def memory_of(config: RunConfig, prompt_tokens: int) -> MemoryEstimate:
    """The memory that training needs, evaluation left out; loads no weights.

    Args:
        config: the run.
        prompt_tokens: of a prompt, on average. What prompts begin with alike is counted for each.

    Raises:
        ModelError: there is no model.
        RuntimeError: as ``saved_bytes``.
    """
    return _estimate(_within_context(config), prompt_tokens)


def _estimate(config: RunConfig, prompt_tokens: int) -> MemoryEstimate:
    update = config.update
    device, compute = usable_device(device_of(config.model)), compute_options(config)
    on_cpu = device.type == "cpu"
    model = model_in_outline(config.model)
    sizes, row = model_sizes(model), _row(config, prompt_tokens)
    if isinstance(config.engine, LocalEngineConfig):
        dtype = torch.bfloat16 if compute.autocast else getattr(torch, config.model.dtype)
        paged, prompts = pages_fit(device, dtype), min(config.train.prompts_per_step, TASKS_AT_ONCE)
        longest = prompt_tokens + config.mode.max_response_tokens
        columns = 0 if paged else prompts * _most_edges(config)[1] * shelf_capacity(longest)
        held = min(gib(config.engine.max_batch_gib), columns * token_bytes(sizes, compute))
        kept = prompts * (prompt_tokens + _sampled_tokens(config, PAGE - 1 if paged else 0))
        of_one = state_bytes(model.config.get_text_config(), product_bytes(sizes, compute))
        held += prompts * _most_states(config) * of_one
    else:
        halved = 2 if config.model.autocast else 1
        held, kept = _vllm_bytes(config.engine, sizes.weight_bytes // halved, device), 0
    needs = UpdateSizes(
        activations=saved_bytes(model, row, compute, device),
        targets=len(row.target_ids),
        reference=update.kl_coefficient > 0 and config.model.lora is None,
        entropy_bonus=update.entropy_coefficient != 0,
        offload=update.offload_optimizer and not on_cpu,
        model_samples=config.engine.kind == "local",
        sampler_bytes=held,
        sampled_tokens=kept,
        sampler_stays=on_cpu or config.engine.kind == "vllm",
        device_type=device.type,
    )
    return estimate_memory(sizes, needs, compute)


def _vllm_bytes(
    engine: VllmEngineConfig | VerlEngineConfig, weight_bytes: int, device: torch.device
) -> int:
    """What vLLM holds: its own weights, keys and values."""
    if device.type == "cpu":
        return weight_bytes + gib(engine.kv_cache_gib)
    return int(engine.gpu_memory_utilization * torch.cuda.mem_get_info(device)[1])


def _graph_tokens(config: RunConfig) -> int:
    """The most tokens that one graph can have, its prompt left out: every edge at its limit."""
    (sampled, observed), budget = _edge_tokens(config), config.budget.tokens
    edges, paths = _most_edges(config)
    tokens = edges * observed + (edges * sampled if budget is None else budget)
    return min(tokens, paths * config.mode.max_response_tokens)


def _sampled_tokens(config: RunConfig, unused: int) -> int:
    """The most tokens that the sampler keeps of one graph: also the policy's summaries.

    Args:
        config: the run.
        unused: tokens for which a sampled text leaves room at its end.
    """
    tokens = _graph_tokens(config) + _most_edges(config)[0] * unused
    if summaries := _most_summaries(config):
        assert isinstance(config.state, SummaryState)
        request = len(HfTokenizer.load(config.model.path).encode(SUMMARY_REQUEST))
        tokens += summaries * (request + config.state.max_summary_tokens + unused)
    return tokens


def _most_states(config: RunConfig) -> int:
    """The most places of one graph at which the sampler keeps what linear layers know."""
    behind = 1 if isinstance(config.mode, SegmentMode) else 2  # a turn, and what it observed
    return 1 + behind * _most_edges(config)[0] + 2 * _most_summaries(config)


def _most_summaries(config: RunConfig) -> int:
    """The most states of one graph that the policy summarises, the prompt's among them."""
    if isinstance(config.state, SummaryState) and isinstance(config.method, GraphPOMethod):
        return 1 + _most_edges(config)[0]
    return 0


def _edge_tokens(config: RunConfig) -> tuple[int, int]:
    """The most sampled and observed tokens of an edge."""
    mode = config.mode
    if isinstance(mode, SegmentMode):
        return mode.segment_length, 0
    return mode.max_turn_tokens, mode.max_observation_tokens


def _most_edges(config: RunConfig) -> tuple[int, int]:
    """The most edges and paths that one graph can have, all at their limits.

    Of a budget of tokens that is, in agent mode, if turns are short.
    """
    mode, budget = config.mode, config.budget
    sampled, _ = _edge_tokens(config)
    in_segments = isinstance(mode, SegmentMode)
    layers = -(-mode.max_response_tokens // sampled) if in_segments else mode.max_turns
    if budget.tokens is not None:
        edges = -(-budget.tokens // (sampled if in_segments else min(sampled, _SHORT_TURN)))
        return edges, edges
    if budget.trajectories is not None:
        return budget.trajectories * layers, budget.trajectories
    schedule = _schedule(config.method, mode.max_response_tokens)
    edges, width = 0, 1
    for layer in range(1, min(layers, len(schedule)) + 1):
        width *= branching_at(schedule, layer)
        edges += width
    return edges + width * max(0, layers - len(schedule)), width  # later layers go on with 1


def _schedule(method: MethodConfig, response_tokens: int) -> tuple[int, ...]:
    """At most so many continuations of a path in each layer; of forks, all in the first."""
    match method:
        case DapoMethod() | GrpoMethod() | PrmMethod() | ProsMethod():
            return (method.group_size,)
        case TreeRLMethod():
            return (method.trees * (1 + method.rounds * method.forks * method.copies),)
        case TreeGrpoMethod():
            return (method.trees * (1 + method.rounds * method.expansions),)
        case TreePOMethod() | OwnMethod():
            return (method.width,)
        case SpoChainMethod():
            cuts = -(-response_tokens // method.cut_interval)
            return (method.num_chains * (1 + cuts * method.rollouts),)
        case _:
            return method.schedule
