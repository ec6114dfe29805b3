"""A local engine over a tiny model, and what it learns from."""

from graphpo_agent.engines.local.engine import LocalEngine
from graphpo_agent.engines.local.options import ImitationOptions, OptimizerOptions, UpdateOptions
from graphpo_agent.types import Demonstration, Piece
from tests.engines.graphs import random_sample

UPDATING = UpdateOptions(learning_rate=0.01, minibatch_graphs=2, warmup_steps=3, seed=5)
IMITATION = ImitationOptions(learning_rate=0.01, total_steps=10, warmup_steps=2)
SAMPLES = [random_sample(seed, 6 + seed) for seed in range(5)]
DEMONSTRATIONS = [
    Demonstration(
        id=f"d{i}",
        messages=({"role": "user", "content": "who mentored karo venn?"},),
        pieces=(
            Piece("<search> karo venn </search>", trained=True),
            Piece(f" born in {1921 + i}\n", trained=False),
            Piece("<answer> orla </answer>", trained=True),
        ),
    )
    for i in range(3)
]


def make_engine(model, tokenizer, updating=UPDATING, **options):
    return LocalEngine(model, tokenizer, OptimizerOptions(**options), updating, IMITATION)


def weights_of(model):
    return {name: value.clone() for name, value in model.state_dict().items()}
