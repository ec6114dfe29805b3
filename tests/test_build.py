"""What a configuration says reaches the engine that is built from it."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from transformers import BertConfig, BertLMHeadModel, ElectraConfig, ElectraForCausalLM

from graphpo_agent.build import build_engine, build_policy, build_sft_engine
from graphpo_agent.build_state import build_state
from graphpo_agent.config import RunConfig, SftConfig
from graphpo_agent.config_file import load_config
from graphpo_agent.config_state import (
    EmbedderConfig,
    EncoderEmbedderConfig,
    FrozenSummaryState,
    HashingEmbedderConfig,
    KeyState,
    OpenAIEmbedderConfig,
    StateConfig,
    TeiEmbedderConfig,
    TextState,
)
from graphpo_agent.encoder import EncoderEmbedder
from graphpo_agent.engines.local.options import (
    ComputeOptions,
    ImitationOptions,
    OptimizerOptions,
    UpdateOptions,
)
from graphpo_agent.errors import ConfigError, ModelError
from graphpo_agent.types import Message, PathState
from tests.net.servers import serving
from tests.net.test_embeddings import openai_server, tei_server
from tests.rollout.scripted import describe
from tests.rollout.test_frozen_summary import SILENT, state_of
from tests.worlds import ROOT, run_arguments

OPTIMIZER = {
    "update.betas": "[0.8, 0.95]",
    "update.weight_decay": "0.3",
    "update.max_grad_norm": "0.7",
    "update.max_tokens_per_batch": "777",
    "update.offload_optimizer": "true",
}
UPDATE = {
    "update.learning_rate": "0.125",
    "update.warmup_steps": "3",
    "update.minibatch_graphs": "5",
    "update.epochs": "6",
    "update.loss_aggregation": "sequence_sum",
    "mode.max_response_tokens": "88",
    "update.old_logprobs": "rollout",
    "sampling.temperature": "0.9",
    "seed": "11",
    "update.clip_low": "0.11",
    "update.clip_high": "0.22",
    "update.dual_clip": "3.5",
    "update.kl_coefficient": "0.01",
    "update.entropy_coefficient": "0.02",
}
COMPUTE = {
    "model.autocast": "true",
    "update.gradient_checkpointing": "true",
    "update.compile_layers": "true",
}


def differing(options: Any, default: Any) -> set[str]:
    """The fields in which two of a kind differ."""
    own, other = asdict(options), asdict(default)
    return {name for name in own if own[name] != other[name]}


@pytest.mark.slow  # layers are compiled, which takes a C++ compiler
def test_every_setting_of_the_update_reaches_the_engine(reach: Path, tmp_path: Path) -> None:
    settings = {**OPTIMIZER, **UPDATE, **COMPUTE, "model.device": "cpu"}
    path, *run = run_arguments(reach, tmp_path)
    overrides = [*run, *(f"{name}={value}" for name, value in settings.items())]
    engine = cast(Any, build_engine(load_config(RunConfig, path, overrides)))

    updating: UpdateOptions = engine._updating
    assert asdict(updating) == {
        "learning_rate": 0.125,
        "warmup_steps": 3,
        "minibatch_graphs": 5,
        "epochs": 6,
        "objective": {
            "clip_low": 0.11,
            "clip_high": 0.22,
            "dual_clip": 3.5,
            "kl": 0.01,
            "entropy": 0.02,
        },
        "loss_aggregation": "sequence_sum",
        "horizon": 88,
        "old_logprobs": "rollout",
        "mismatch_cap": None,  # goes with recomputed log-probabilities alone
        "temperature": 0.9,
        "seed": 11,
    }
    optimizer: OptimizerOptions = engine._options
    assert asdict(optimizer) == {
        "betas": (0.8, 0.95),
        "weight_decay": 0.3,
        "max_grad_norm": 0.7,
        "max_tokens": 777,
        "offload": True,
    }
    assert engine._compute == ComputeOptions(True, True, True)
    for given, default in (
        (updating, UpdateOptions()),
        (optimizer, OptimizerOptions()),
        (engine._compute, ComputeOptions()),
    ):
        fields = set(asdict(default)) - {"mismatch_cap"}
        assert differing(given, default) == fields, "no setting is at its default"
    capped = load_config(RunConfig, path, [*run, "update.mismatch_cap=2.5"])
    assert cast(Any, build_engine(capped))._updating.mismatch_cap == 2.5


@pytest.mark.parametrize("gib", [0.25, 0.5])
def test_the_bound_of_what_runs_at_once_reaches_the_sampler(
    reach: Path, tmp_path: Path, gib: float
) -> None:
    run = run_arguments(reach, tmp_path, f"engine={{kind: local, max_batch_gib: {gib}}}")
    engine = cast(Any, build_engine(load_config(RunConfig, run[0], run[1:])))
    policy = engine.policy
    assert policy._max_columns == int(gib * 2**30) // policy._shape.bytes_per_token


def test_a_model_that_looks_ahead_is_not_sampled_either(reach: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(reach / "policy", tmp_path / "bert")
    values = json.loads((directory / "config.json").read_text())
    values |= {"model_type": "bert", "architectures": ["BertLMHeadModel"], "initializer_range": 0.2}
    BertLMHeadModel(BertConfig(**values)).save_pretrained(directory)
    run = run_arguments(reach, tmp_path, f"model.path={directory}")
    with pytest.raises(ModelError, match="changes its attention or its logits"):
        build_policy(load_config(RunConfig, run[0], run[1:]))


@pytest.mark.parametrize("build", [build_policy, build_engine])
def test_a_model_whose_head_takes_other_numbers_is_one_line(
    reach: Path, tmp_path: Path, build: Callable[[RunConfig], object]
) -> None:
    directory = shutil.copytree(reach / "policy", tmp_path / "electra")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    vocabulary = json.loads((directory / "config.json").read_text())["vocab_size"]
    config = ElectraConfig(vocab_size=vocabulary, embedding_size=8, is_decoder=True, **sizes)
    ElectraForCausalLM(config).save_pretrained(directory)
    run = run_arguments(reach, tmp_path, f"model.path={directory}", "model.device=cpu")
    with pytest.raises(ModelError, match=r"cannot be computed: .*; use another model family"):
        build(load_config(RunConfig, run[0], run[1:]))


def test_every_setting_of_a_warm_start_reaches_the_engine(reach: Path) -> None:
    overrides = [
        f"model.path={reach}/policy",
        "model.device=cpu",
        "model.autocast=true",
        "learning_rate=0.25",
        "steps=9",
        "warmup_steps=4",
        *(
            f"{name.removeprefix('update.')}={value}"
            for name, value in OPTIMIZER.items()
            if "offload" not in name
        ),
    ]
    config = load_config(SftConfig, ROOT / "configs/toy/reach_sft.yaml", overrides)
    engine = cast(Any, build_sft_engine(config))
    assert engine._imitation == ImitationOptions(0.25, 9, 4)
    assert engine._options == OptimizerOptions((0.8, 0.95), 0.3, 0.7, 777)
    assert engine._compute == ComputeOptions(autocast=True)


HASHING = HashingEmbedderConfig(kind="hashing", dimension=64)


class Repeats:
    """A chat model that tells what it was asked for."""

    def reply(self, messages: Sequence[Message], max_tokens: int) -> str:
        content = messages[0]["content"]
        path = json.loads(content[content.index("\n{") :])
        return f"{max_tokens}: {path['written']}"


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (TextState(kind="text", embedder=HASHING, max_characters=3), "xyz"),
        (
            FrozenSummaryState(
                kind="frozen_summary",
                chat={"class": f"{__name__}:Repeats"},
                embedder=HASHING,
                max_summary_tokens=7,
                max_characters=10,
            ),
            "7: vwxyz",
        ),
    ],
)
def test_every_setting_of_a_state_reaches_what_describes_it(state: StateConfig, text: str) -> None:
    describer, embedder = build_state(state)
    (described,) = describe(describer, SILENT, [state_of(response="stuvwxyz")])
    assert described.text == text
    assert embedder is not None and embedder.embed([text]).shape == (1, 64)


class Beginning:
    """A state key with a setting."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __call__(self, state: PathState) -> str:
        return state.response[: self._length]


def test_a_state_key_may_be_an_object_with_settings() -> None:
    function = {"class": f"{__name__}:Beginning", "length": 3}
    describer, embedder = build_state(KeyState(kind="key", function=function))
    (described,) = describe(describer, SILENT, [state_of(response="stuvwxyz")])
    assert described.key == "stu" and embedder is None


def test_what_is_no_chat_model_sums_nothing_up() -> None:
    chat = {"class": "graphpo_agent.rewards.asearcher:ASearcherReward"}
    with pytest.raises(ConfigError, match=r"state\.chat: .*ASearcherReward has no reply method"):
        build_state(FrozenSummaryState(kind="frozen_summary", chat=chat, embedder=HASHING))


def embedded(config: EmbedderConfig, texts: list[str]) -> Any:
    _, embedder = build_state(TextState(kind="text", embedder=config))
    assert embedder is not None
    return embedder.embed(texts)


def test_every_setting_of_an_embedder_reaches_it(
    reach: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["7 to 23 with +3 *2", "to 9"]
    options: Any = {"pooling": "last", "prefix": "from ", "max_tokens": 4, "batch_size": 1}
    encoder = EncoderEmbedderConfig(kind="encoder", path=str(reach / "policy"), **options)
    expected = EncoderEmbedder(reach / "policy", **options).embed(texts)
    assert np.array_equal(embedded(encoder, texts), expected)

    monkeypatch.setenv("EMBED_KEY", "sk-12345678")
    own: Any = {"api_key_env": "EMBED_KEY", "prefix": "query: "}
    with serving(openai_server) as server:
        embedded(OpenAIEmbedderConfig(kind="openai", base_url=server.url, model="e5", **own), ["a"])
    (request,) = server.requests
    assert request.headers["Authorization"] == "Bearer sk-12345678"
    assert request.json() == {"model": "e5", "input": ["query: a"]}
    with serving(tei_server) as server:
        embedded(TeiEmbedderConfig(kind="tei", url=server.url, prefix="query: "), ["a"])
    assert server.requests[0].json()["inputs"] == ["query: a"]
