"""How good are the estimates before any training? Two questions, asked of the base policy.

1. *Values*: how far are the node scores S(v) and advantages from Monte-Carlo values V*? Trees are
   grown once; the same rollouts are scored unmerged, merged with pooling, and with class backup,
   so that nothing but the estimator differs.
2. *Gradients*: the cosine between one batch's gradient and a large-sample policy gradient on the
   same prompts, and from it the signal-to-noise ratio per 1,000 generated tokens,
   1000 cos² / (1 - cos²) / tokens.

    python benchmarks/estimators.py                # about 15 minutes on one core
    python benchmarks/estimators.py --worlds reach --prompts 8 --continuations 16
"""

import argparse
import json
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.engine_parts.machine import RESULTS, ROOT
from benchmarks.toy_worlds import WORK, prepare
from graphpo_agent.build import build_engine, build_grower
from graphpo_agent.config import RunConfig
from graphpo_agent.config_file import load_config
from graphpo_agent.data.tasks import load_tasks
from graphpo_agent.engines.local.engine import LocalEngine
from graphpo_agent.engines.local.forward import flat_passes, score_tokens
from graphpo_agent.engines.local.options import ComputeOptions
from graphpo_agent.engines.local.packing import pack
from graphpo_agent.engines.local.token_weights import LossAggregation, token_weights
from graphpo_agent.graph.credit import CreditOptions, GraphCredit, graph_credit
from graphpo_agent.graph.equivalence import MergeOptions, find_classes
from graphpo_agent.graph.samples import TrainingSample
from graphpo_agent.methods.graphpo import GraphPO
from graphpo_agent.methods.grpo import Grpo
from graphpo_agent.methods.method import Method, training_sample
from graphpo_agent.methods.tree import tree
from graphpo_agent.rollout.grow import Grower, Rollout
from graphpo_agent.rollout.scheduler import PolicyScheduler
from graphpo_agent.rollout.seeds import derive_seed
from graphpo_agent.types import PathState, SamplingParams, Task

GROUP_SIZE = 10
"""Chains that cost about as many tokens as a schedule of the toy configurations."""
SAMPLING = SamplingParams()
NO_MERGE = MergeOptions(merge="none")
INHERIT = CreditOptions(singleton="inherit")
PLUS = CreditOptions(backup="class", normalize="rms", singleton="inherit", trajectory_weight=1.0)


@dataclass(frozen=True)
class Bench:
    """A world with its base policy."""

    name: str
    engine: LocalEngine
    grower: Grower
    tasks: list[Task]
    schedule: tuple[int, ...]
    group_size: int

    def grow(self, method: Method, tasks: Sequence[Task], name: str | int) -> list[Rollout]:
        return self.grower.grow(self.engine.policy, tasks, method, SAMPLING, ("bench", name))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--worlds", nargs="+", choices=["kb", "reach"], default=["kb", "reach"])
    parser.add_argument("--prompts", type=int, default=24, help="for the values")
    parser.add_argument("--continuations", type=int, default=48, help="per node, for V*")
    parser.add_argument("--gradient-prompts", type=int, default=16)
    parser.add_argument("--replicates", type=int, default=10, help="gradients per method")
    parser.add_argument("--reference", type=int, default=24, help="large-sample batches")
    parser.add_argument("--work", type=Path, default=WORK)
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = [f"{platform.platform()}, {os.cpu_count()} CPUs, one thread, the map's base policies."]
    results: dict[str, object] = {}
    for name in options.worlds:
        bench = open_bench(name, options.work)
        values = value_study(bench, options.prompts, options.continuations)
        gradients = gradient_study(
            bench, options.gradient_prompts, options.replicates, options.reference
        )
        results[name] = {"values": values, "gradients": gradients}
        lines += [*values_table(name, values), *gradients_table(name, gradients)]
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "estimators.json").write_text(json.dumps(results, indent=1) + "\n")
    (RESULTS / "estimators.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def open_bench(name: str, work: Path) -> Bench:
    prepare(name, work)
    overrides = [f"model.path={work / name / 'policy'}"]
    if name == "kb":
        overrides.append(f"mode.tools.search.retriever.directory={work / name / 'index'}")
    config = load_config(RunConfig, ROOT / f"configs/toy/{name}.yaml", overrides)
    engine = build_engine(config)
    assert config.method.name == "graphpo" and isinstance(engine, LocalEngine)
    return Bench(
        name,
        engine,
        build_grower(config),
        load_tasks(work / name / "heldout.jsonl"),
        config.method.schedule,
        GROUP_SIZE,
    )


# ---- values


def value_study(bench: Bench, prompts: int, continuations: int) -> list[dict[str, float | str]]:
    """Errors of S(v) and of the correctness advantage against V*, per estimator."""
    trees = bench.grow(tree(bench.schedule), bench.tasks[:prompts], "values")
    chains = bench.grow(Grpo(bench.group_size), bench.tasks[:prompts], "values")
    tree_values = [node_values(bench, rollout, continuations) for rollout in trees]
    chain_values = [node_values(bench, rollout, continuations) for rollout in chains]
    estimators: dict[str, Callable[[Rollout], GraphCredit]] = {
        "tree (nothing merged)": credit_with(INHERIT, NO_MERGE),
        "merged, w = 0": credit_with(replace(INHERIT, pool_weight=0.0)),
        "merged, w = 0.7 (the paper's)": credit_with(INHERIT),
        "merged, w = 1": credit_with(replace(INHERIT, pool_weight=1.0)),
        "merged, w = 0.7, backup mean": credit_with(replace(INHERIT, backup="mean")),
        "merged, class backup, RMS": credit_with(replace(PLUS, trajectory_weight=0.0)),
    }
    rows: list[dict[str, float | str]] = []
    for name, credit in estimators.items():
        credits = [credit(rollout) for rollout in trees]
        errors = np.concatenate(
            [score_errors(*each) for each in zip(trees, credits, tree_values, strict=True)]
        )
        rows.append(
            {"estimator": name, "mean squared error of S": float(np.mean(errors**2))}
            | agreement(
                [credit.correctness_advantage[1:] for credit in credits],
                [oracle_advantage(r, v) for r, v in zip(trees, tree_values, strict=True)],
            )
        )
    method = Grpo(bench.group_size)
    advantages = [
        method.assign_credit([rollout.graph], [rollout.classes])[0].advantages[0, 1:]
        for rollout in chains
    ]
    oracle = [oracle_advantage(r, v) for r, v in zip(chains, chain_values, strict=True)]
    rows.append({"estimator": "GRPO on chains"} | agreement(advantages, oracle))
    return rows


def credit_with(
    options: CreditOptions, merging: MergeOptions | None = None
) -> Callable[[Rollout], GraphCredit]:
    chosen = merging or MergeOptions()

    def credit(rollout: Rollout) -> GraphCredit:
        return graph_credit(rollout.graph, find_classes(rollout.graph, chosen), options)

    return credit


def node_values(bench: Bench, rollout: Rollout, continuations: int) -> np.ndarray:
    """[n] V*: the reward of a terminal, else the mean over fresh continuations to the end."""
    graph, policy = rollout.graph, bench.engine.policy
    values = graph.reward.copy()
    open_nodes = np.flatnonzero(~graph.terminal)
    states: list[PathState] = []
    for v in open_nodes.tolist():
        state = rollout.states[v]
        tokens = np.concatenate([graph.token_ids[graph.span(u)] for u in [0, *graph.path(v)]])
        states.append(replace(state, context=policy.open(tokens.tolist())))
    values[open_nodes] = mean_rewards(bench, states, continuations)
    policy.release()
    return values


def mean_rewards(bench: Bench, states: Sequence[PathState], continuations: int) -> np.ndarray:
    """[len(states)] mean reward of ``continuations`` fresh continuations of each state."""
    scheduler = PolicyScheduler(bench.engine.policy, overlap=False)

    async def reward(state: PathState, *seed_parts: int) -> float:
        while True:
            seed = derive_seed("continuation", *seed_parts, state.depth)
            (step,) = await bench.grower.expander.expand(scheduler, [state], [seed], SAMPLING)
            if step.terminal:
                found = bench.grower.judge(step.state)
                assert found is not None, "the toy verifiers ask nobody"
                return found
            state = step.state

    rewards = scheduler.run(
        [reward(state, i, j) for i, state in enumerate(states) for j in range(continuations)]
    )
    return np.reshape(rewards, (len(states), continuations)).mean(1)


def score_errors(rollout: Rollout, credit: GraphCredit, values: np.ndarray) -> np.ndarray:
    """S(v) - V*(v) on the states that were continued, the root apart."""
    inner = np.flatnonzero(~rollout.graph.terminal)[1:]
    errors = credit.score[inner] - values[inner]
    return errors[~np.isnan(errors)]


def oracle_advantage(rollout: Rollout, values: np.ndarray) -> np.ndarray:
    """[num_edges] V*(v) - V*(parent)."""
    return values[1:] - values[rollout.graph.parent[1:]]


def agreement(
    advantages: Sequence[np.ndarray], oracle: Sequence[np.ndarray]
) -> dict[str, float | str]:
    estimate, truth = np.concatenate(advantages), np.concatenate(oracle)
    nonzero = (estimate != 0) & (truth != 0)
    return {
        "correlation with V*(v) - V*(u)": float(np.corrcoef(estimate, truth)[0, 1]),
        "share of edges with an advantage": float(np.mean(estimate != 0)),
        "same sign": float(np.mean(np.sign(estimate[nonzero]) == np.sign(truth[nonzero]))),
    }


# ---- gradients


def gradient_study(
    bench: Bench, prompts: int, replicates: int, reference_batches: int
) -> list[dict[str, float | str]]:
    """Cosine to a large-sample gradient, per method, at about equal generated tokens."""
    tasks = bench.tasks[:prompts]
    halves = [torch.zeros(()), torch.zeros(())]
    for batch in range(reference_batches):
        wide = Grpo(2 * bench.group_size, normalize="none")
        found, _ = method_gradient(bench, wide, tasks, f"reference {batch}", "token_mean")
        halves[batch % 2] = halves[batch % 2] + found
    reference = halves[0] + halves[1]
    split_half = float(torch.cosine_similarity(halves[0], halves[1], dim=0))
    plus = GraphPO(schedule=bench.schedule, credit=PLUS, name="graphpo, beyond the paper")
    methods: list[tuple[str, Method]] = [
        ("grpo", Grpo(bench.group_size)),
        ("tree", tree(bench.schedule, INHERIT)),
        ("graphpo", GraphPO(schedule=bench.schedule, credit=INHERIT)),
        ("graphpo, class backup + RMS + trajectory", plus),
    ]
    rows: list[dict[str, float | str]] = []
    for name, method in methods:
        cosines, tokens = [], []
        for replicate in range(replicates):
            found, spent = method_gradient(bench, method, tasks, replicate, "edge_mean")
            cosines.append(float(torch.cosine_similarity(found, reference, dim=0)))
            tokens.append(spent)
        mean = float(np.mean(cosines))
        rows.append(
            {
                "method": name,
                "cosine": mean,
                "standard error": float(np.std(cosines, ddof=1) / len(cosines) ** 0.5),
                "tokens": float(np.mean(tokens)),
                "SNR per 1,000 tokens": 1000 * mean**2 / (1 - mean**2) / float(np.mean(tokens)),
                "split-half cosine of the reference": split_half,
            }
        )
    return rows


def method_gradient(
    bench: Bench,
    method: Method,
    tasks: Sequence[Task],
    name: str | int,
    aggregation: LossAggregation,
) -> tuple[torch.Tensor, int]:
    """[num_parameters] gradient of one batch, and the tokens generated for it."""
    rollouts = bench.grow(method, tasks, name)
    credits = method.assign_credit(
        [rollout.graph for rollout in rollouts], [rollout.classes for rollout in rollouts]
    )
    samples = [training_sample(r.graph, c) for r, c in zip(rollouts, credits, strict=True)]
    tokens = sum(rollout.ledger.generated_tokens for rollout in rollouts)
    return policy_gradient(bench.engine, samples, aggregation), tokens


def policy_gradient(
    engine: LocalEngine, samples: Sequence[TrainingSample], aggregation: LossAggregation
) -> torch.Tensor:
    """Gradient of sum(weight * A * log pi): the PPO gradient where the ratio is 1."""
    loss = token_weights(samples, aggregation)
    weights = loss.weights * np.nan_to_num(loss.advantages.sum(0))
    engine.model.zero_grad()
    compute = ComputeOptions()
    with flat_passes(engine.model, compute):
        for batch in pack(samples, max_tokens=4096):
            scores = score_tokens(engine.model, batch, 1.0, compute)
            factor = torch.from_numpy(weights[batch.source]).to(scores.logprobs.dtype)
            (scores.logprobs * factor).sum().backward()
    gradients = [p.grad.flatten() for p in engine.model.parameters() if p.grad is not None]
    return torch.cat(gradients).double()


# ---- tables


def values_table(name: str, rows: Sequence[dict[str, float | str]]) -> list[str]:
    return [f"\n### {name}: estimates against Monte-Carlo values\n", *markdown(rows)]


def gradients_table(name: str, rows: Sequence[dict[str, float | str]]) -> list[str]:
    return [f"\n### {name}: gradients against a large-sample gradient\n", *markdown(rows)]


def markdown(rows: Sequence[dict[str, float | str]]) -> list[str]:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = ["| " + " | ".join(columns) + " |", "| " + " | ".join("---" for _ in columns) + " |"]
    for row in rows:
        cells = [row.get(name, "") for name in columns]
        shown = [cell if isinstance(cell, str) else f"{cell:.4g}" for cell in cells]
        lines.append("| " + " | ".join(shown) + " |")
    return lines


if __name__ == "__main__":
    main()
