"""What ``method_map.py`` compares: the worlds, the methods and what each method is tuned over."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

__all__ = [
    "FINALISTS",
    "METHODS",
    "TUNING_SEEDS",
    "WORLDS",
    "Setting",
    "World",
    "settings",
    "structure",
]

TUNING_SEEDS = range(100, 103)
FINALISTS = 2
"""Settings of a method that are tried with more than the first tuning seed."""


@dataclass(frozen=True, slots=True)
class World:
    """A world and what an update costs in it, the same for every method.

    Attributes:
        toy: which of the generated worlds it is.
        sft_steps: of the warm start; they leave something to learn.
        prompts: of an update.
        tokens: policy tokens of each prompt: its responses and something to spare.
        updates: as many tokens as they cost are generated in a run.
        steps: edges of a typical response.
        responses: independent ones of each prompt.
        splits: of the prompts that methods are tuned over: half as many with twice the samples.
        learning_rates: that they are tuned over.
        knobs: sizes of the world and of its model, where they are not the usual ones.
        sft: overrides of the warm start.
        run: overrides of the run.
        large: its model has 20 M parameters, so that it is measured only where it is named.
    """

    toy: str
    sft_steps: int
    prompts: int
    tokens: int
    updates: int
    steps: int
    responses: int = 8
    splits: tuple[int, ...] = (1, 2)
    learning_rates: tuple[float, ...] = (2e-4, 5e-4)
    knobs: tuple[str, ...] = ()
    sft: tuple[str, ...] = ()
    run: tuple[str, ...] = ()
    large: bool = False

    @property
    def token_budget(self) -> int:
        """Of a whole run."""
        return self.prompts * self.tokens * self.updates


_LARGE_MODEL = ("hidden_size=512", "num_layers=6", "num_heads=8")
_LARGE = ("model.device=auto", "model.autocast=true")
_LARGE_RUN = (*_LARGE, "update.max_tokens_per_batch=16384")
_large = partial(
    World,
    splits=(1,),
    learning_rates=(6e-5,),
    sft=(*_LARGE, "learning_rate=5.0e-4", "max_tokens_per_batch=16384"),
    large=True,
)
WORLDS = {
    "reach": World("reach", sft_steps=1200, prompts=18, tokens=240, updates=36, steps=4),
    "kb": World("kb", sft_steps=500, prompts=12, tokens=700, updates=30, steps=5),
    "trace": World("trace", sft_steps=500, prompts=18, tokens=520, updates=32, steps=16),
    "hops": World("hops", sft_steps=800, prompts=18, tokens=370, updates=36, steps=7),
    "reach-large": _large(
        "reach",
        sft_steps=500,
        prompts=18,
        tokens=400,
        updates=48,
        steps=6,
        responses=16,
        knobs=(
            *("min_distance=5", "max_distance=7", "num_train=2000", "num_heldout=200"),
            *_LARGE_MODEL,
        ),
        run=(*_LARGE_RUN, "mode.max_response_tokens=24"),
    ),
    "hops-large": _large(
        "hops",
        sft_steps=300,
        prompts=12,
        tokens=370,
        updates=8,
        steps=7,
        knobs=("num_entities=16000", *_LARGE_MODEL),
        run=(*_LARGE_RUN, "train.eval_tasks=200"),
    ),
}


@dataclass(frozen=True, slots=True)
class Setting:
    """A method with the numbers it is tuned over.

    Example: ``Setting("grpo", prompts=18, responses=8, tokens=370, learning_rate=2e-4)``.

    Attributes:
        prompts: of an update.
        responses: independent ones that cost as much as the budget of a prompt.
        tokens: that budget.
    """

    method: str
    prompts: int
    responses: int
    tokens: int
    learning_rate: float

    @property
    def label(self) -> str:
        """A name for files: ``grpo-p18-lr0.0002``."""
        return f"{self.method}-p{self.prompts}-lr{self.learning_rate:g}"

    def tasks(self, world: World) -> int | None:
        """How many tasks it trains on; ``None``: all there are, more than a run asks for.

        PROS comes to each of its own four times, because it goes on from earlier answers.
        """
        return self.prompts * world.updates // 4 if self.method == "pros" else None

    def configuration(
        self, world: World, preset: dict[str, Any], tasks: str, step_scorer: str
    ) -> dict[str, Any]:
        """What is laid over the world's configuration.

        Args:
            world: where it runs.
            preset: ``configs/methods/<method>/graphpo_adapted.yaml``; its method is given the size
                of the budget, its update the learning rate and two minibatches.
            tasks: file of the tasks to train on.
            step_scorer: directory of the world's process reward model.
        """
        method = preset["method"] | structure(self.method, self.responses, world.steps)
        if self.method == "prm":
            method["scorer"] = {
                "class": "graphpo_agent.prm_local:PrefixScorer",
                "model": step_scorer,
                "batch_size": 64,
            }
        update = preset["update"] | {
            "learning_rate": self.learning_rate,
            "minibatch_graphs": -(-self.prompts // 2),
        }
        budget = {"tokens": self.tokens}
        train: dict[str, Any] = {"prompts_per_step": self.prompts}
        if self.method == "dapo":
            train["max_resample"] = 3
        return {
            "method": method,
            "update": update,
            "budget": budget,
            "train": train,
            "tasks": {"train": tasks},
        }


def settings(method: str, world: World) -> Iterator[Setting]:
    """What a method is tuned over: prompts against samples of each, and learning rates."""
    for split in world.splits:
        for learning_rate in world.learning_rates:
            yield Setting(
                method,
                world.prompts // split,
                world.responses * split,
                world.tokens * split,
                learning_rate,
            )


METHODS = {
    "graphpo": "graphpo/paper",
    "plus": "graphpo/plus",
    "waves": "graphpo/plus",
    "tree": "tree/graphpo_adapted",
    "grpo": "grpo/graphpo_adapted",
    "dapo": "dapo/graphpo_adapted",
    "treerl": "treerl/graphpo_adapted",
    "spo_tree": "spo_tree/graphpo_adapted",
    "spo_chain": "spo_chain/graphpo_adapted",
    "tree_grpo": "tree_grpo/graphpo_adapted",
    "treepo": "treepo/graphpo_adapted",
    "treerpo": "treerpo/graphpo_adapted",
    "pros": "pros/graphpo_adapted",
    "prm": "prm/graphpo_adapted",
}
"""Each method's preset. *waves* is *plus* that spends half of the budget on uncertain states."""


def structure(method: str, responses: int, steps: int) -> dict[str, Any]:
    """A method's own sizes, for a budget of so many independent responses of so many steps.

    Chains from the prompt spend what a structure leaves over.
    """
    half = responses // 2
    match method:
        case "graphpo" | "tree":
            return {"schedule": [half, 2, 1], "singleton": "inherit"}
        case "plus":
            return {"schedule": _late(responses, steps)}
        case "waves":
            return {"schedule": [half, 1], "refill": "uncertain"}
        case "treerl":
            return {"trees": responses * 3 // 7, "forks": 1, "rounds": 1, "copies": 2}
        case "tree_grpo":
            return {"trees": responses * 3 // 7, "expansions": 2, "rounds": 1}
        case "spo_tree" | "treerpo":  # their steps are what lies between two forks
            return {"schedule": _spread(responses, steps)}
        case "spo_chain":
            return {"num_chains": max(2, half // 2), "rollouts": 2, "cut_interval": steps // 2}
        case "treepo":
            return {"width": responses}
        case _:
            return {"group_size": responses}


def _late(responses: int, steps: int) -> list[int]:
    """3/7 of the budget as chains that branch in two after a third and two thirds of a response."""
    schedule = [1] * (2 * steps // 3 + 2)
    schedule[0] = responses * 3 // 7
    schedule[steps // 3] = schedule[2 * steps // 3] = 2
    return schedule


def _spread(responses: int, steps: int) -> list[int]:
    """As many branches in two, spread over a response, as lead to so many responses."""
    branches = responses.bit_length() - 1
    schedule = [1] * steps
    for number in range(branches):
        schedule[number * steps // branches] = 2
    return schedule
