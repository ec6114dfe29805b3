"""Configuration → the engine, the grower, and what they are made of."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from graphpo_agent.build_method import check_whole_turns
from graphpo_agent.build_state import build_state
from graphpo_agent.check_segments import check_segments
from graphpo_agent.config import (
    AgentMode,
    ASearcherDialectConfig,
    BudgetConfig,
    HermesDialectConfig,
    LocalEngineConfig,
    ModelConfig,
    RunConfig,
    SamplingConfig,
    SearchR1DialectConfig,
    SegmentMode,
    SftConfig,
    UpdateConfig,
    VerlEngineConfig,
    VllmEngineConfig,
)
from graphpo_agent.config_methods import MethodConfig, PrmMethod
from graphpo_agent.config_state import FrozenSummaryState, KeyState
from graphpo_agent.engines.local.engine import LocalEngine
from graphpo_agent.engines.local.forward import check_flat_layout
from graphpo_agent.engines.local.lora import LoraOptions, add_adapters
from graphpo_agent.engines.local.loss import Objective
from graphpo_agent.engines.local.model import (
    check_vocabulary,
    load_model,
    model_without_weights,
    usable_device,
)
from graphpo_agent.engines.local.options import (
    ComputeOptions,
    ImitationOptions,
    OptimizerOptions,
    UpdateOptions,
)
from graphpo_agent.engines.local.sampler import LocalPolicy
from graphpo_agent.engines.tokenizer import HfTokenizer
from graphpo_agent.engines.vllm import VllmEngine, VllmPolicy
from graphpo_agent.engines.vllm_start import VllmOptions, require_vllm
from graphpo_agent.errors import ConfigError, errors_at
from graphpo_agent.graph.budget import Budget
from graphpo_agent.methods.method import Method
from graphpo_agent.methods.prefix_pool import PrefixPool
from graphpo_agent.methods.pros import Pros
from graphpo_agent.named import callable_of, check_constructible, constructed
from graphpo_agent.protocols import (
    Engine,
    Expander,
    Policy,
    StepScorer,
    Tokenizer,
    Tool,
)
from graphpo_agent.rollout.agent import TurnExpander, check_tools
from graphpo_agent.rollout.dialects.asearcher import ASearcherDialect
from graphpo_agent.rollout.dialects.base import Dialect
from graphpo_agent.rollout.dialects.hermes import HermesDialect, ToolSignature
from graphpo_agent.rollout.dialects.search_r1 import SearchR1Dialect
from graphpo_agent.rollout.grow import Grower
from graphpo_agent.rollout.segment import SegmentExpander
from graphpo_agent.rollout.step_scores import StepScoring
from graphpo_agent.types import SamplingParams

__all__ = [
    "build_budget",
    "build_engine",
    "build_expander",
    "build_grower",
    "build_objective",
    "build_policy",
    "build_prefixes",
    "build_sampling",
    "build_sft_engine",
    "build_step_scoring",
    "check_named",
    "check_precision",
    "compute_options",
    "device_of",
    "gib",
    "model_in_outline",
    "set_threads",
]


def set_threads(threads: int | None) -> None:
    """How many CPU threads torch uses; None leaves its own choice."""
    if threads is not None:
        torch.set_num_threads(threads)


def build_engine(config: RunConfig) -> Engine:
    """The engine of a training run.

    Raises:
        ConfigError: the weights' precision cannot be trained, or vLLM is asked for and missing.
    """
    check_precision(config.model)
    if isinstance(config.engine, LocalEngineConfig):
        return _learner(config, gib(config.engine.max_batch_gib))
    options = _vllm_options(config.engine, config.model)
    require_vllm(options)
    learner = _learner(config)
    tokenizer = HfTokenizer.load(config.model.path)
    return VllmEngine(learner, VllmPolicy(config.model.path, tokenizer, options))


def build_policy(config: RunConfig) -> Policy:
    """The model of a configuration as a sampler that does not learn; ``model.lora`` is unused."""
    path, engine = config.model.path, config.engine
    dtype = getattr(torch, config.model.dtype)
    if isinstance(engine, LocalEngineConfig):
        model, tokenizer = load_model(path, dtype, device_of(config.model)), HfTokenizer.load(path)
        check_vocabulary(model, tokenizer)
        check_flat_layout(model, ComputeOptions(autocast=config.model.autocast))
        return LocalPolicy(model, tokenizer, gib(engine.max_batch_gib), config.model.autocast)
    options = _vllm_options(engine, config.model)
    require_vllm(options)
    usable_device(device_of(config.model))
    tokenizer = HfTokenizer.load(path)
    check_vocabulary(model_without_weights(path, dtype), tokenizer)
    return VllmPolicy(path, tokenizer, options)


def _vllm_options(engine: VllmEngineConfig | VerlEngineConfig, model: ModelConfig) -> VllmOptions:
    if isinstance(engine, VerlEngineConfig):
        raise ConfigError(
            "engine.kind verl only trains: set engine={kind: local} here, or {kind: vllm}"
        )
    return VllmOptions(dtype=model.vllm_dtype, **engine.model_dump(exclude={"kind"}))


def check_precision(config: ModelConfig) -> None:
    """Raise ConfigError for weights whose updates round away; adapters have their own precision."""
    if config.dtype == "bfloat16" and config.lora is None:
        raise ConfigError(
            "model.dtype bfloat16 is too coarse to train: small updates round away; keep float32 "
            "and set model.autocast to true, or set model.lora"
        )


def _learner(config: RunConfig, max_batch_bytes: int = 2**30) -> LocalEngine:
    update = config.update
    updating = UpdateOptions(
        learning_rate=update.learning_rate,
        warmup_steps=update.warmup_steps,
        minibatch_graphs=update.minibatch_graphs,
        epochs=update.epochs,
        objective=build_objective(update),
        loss_aggregation=update.loss_aggregation,
        horizon=config.mode.max_response_tokens,
        old_logprobs=update.old_logprobs,
        mismatch_cap=update.mismatch_cap,
        temperature=config.sampling.temperature,
        seed=config.seed,
    )
    return LocalEngine(
        _model(config.model, config.seed),
        HfTokenizer.load(config.model.path),
        replace(_optimizer_options(update), offload=update.offload_optimizer),
        updating=updating,
        max_batch_bytes=max_batch_bytes,
        compute=compute_options(config),
    )


def build_objective(update: UpdateConfig) -> Objective:
    """What an update maximises."""
    return Objective(
        clip_low=update.clip_low,
        clip_high=update.clip_high,
        dual_clip=update.dual_clip,
        kl=update.kl_coefficient,
        entropy=update.entropy_coefficient,
    )


def build_sft_engine(config: SftConfig) -> LocalEngine:
    """The engine of a warm start.

    Raises:
        ConfigError: the weights' precision cannot be trained.
    """
    check_precision(config.model)
    return LocalEngine(
        _model(config.model, config.seed),
        HfTokenizer.load(config.model.path),
        _optimizer_options(config),
        imitation=ImitationOptions(config.learning_rate, config.steps, config.warmup_steps),
        compute=ComputeOptions(autocast=config.model.autocast),
    )


def gib(count: float) -> int:
    """In bytes."""
    return int(count * 2**30)


def compute_options(config: RunConfig) -> ComputeOptions:
    """How passes are computed."""
    update = config.update
    return ComputeOptions(
        config.model.autocast,
        update.gradient_checkpointing,
        update.compile_layers,
    )


def device_of(config: ModelConfig) -> str:
    """The device's name, ``auto`` resolved."""
    if config.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return config.device


def _optimizer_options(config: UpdateConfig | SftConfig) -> OptimizerOptions:
    return OptimizerOptions(
        betas=config.betas,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        max_tokens=config.max_tokens_per_batch,
    )


def _model(config: ModelConfig, seed: int) -> PreTrainedModel:
    model = load_model(config.path, getattr(torch, config.dtype), device_of(config))
    if config.lora is not None:
        torch.manual_seed(seed)  # of the adapters' first factors; the second ones are 0
    return _with_adapters(model, config)


def model_in_outline(config: ModelConfig) -> PreTrainedModel:
    """What is trained, adapters included, on the ``meta`` device: sizes without memory.

    Raises:
        ConfigError: the adapters do not fit.
        ModelError: there is no such model.
    """
    return _with_adapters(model_without_weights(config.path, getattr(torch, config.dtype)), config)


def _with_adapters(model: PreTrainedModel, config: ModelConfig) -> PreTrainedModel:
    if config.lora is None:
        return model
    return add_adapters(model, LoraOptions(**config.lora.model_dump()))


def build_step_scoring(config: MethodConfig, tokenizer: Tokenizer) -> StepScoring | None:
    """What asks a process reward model, for the method that needs one; a policy's tokenizer."""
    if not isinstance(config, PrmMethod):
        return None
    scorer = constructed(config.scorer)
    if not isinstance(scorer, StepScorer):
        raise ConfigError(f"method.scorer: {config.scorer['class']} has no score method")
    return StepScoring(scorer, config.steps, tokenizer)


def build_prefixes(method: Method) -> PrefixPool | None:
    """The pool of the method that goes on from earlier answers."""
    return PrefixPool(method.pool) if isinstance(method, Pros) else None


def build_budget(config: BudgetConfig) -> Budget:
    """What each prompt of a training step may cost."""
    return Budget(config.tokens, config.trajectories)


def build_sampling(config: SamplingConfig) -> SamplingParams:
    """How training rollouts draw tokens."""
    return SamplingParams(config.temperature, config.top_p)


def build_grower(config: RunConfig) -> Grower:
    """What grows the graphs of a run: its mode, state description and verifier."""
    describer, embedder = build_state(config.state)
    with errors_at("reward"):
        reward_fn = callable_of(config.reward, "task", "outcome")
    return Grower(
        expander=build_expander(config.mode),
        reward_fn=reward_fn,
        describer=describer,
        embedder=embedder,
        truncated=config.truncated,
        outages=config.outages,
        overlap=config.overlap,
    )


def check_named(config: RunConfig) -> None:
    """Find what a run names by import path and check its prompt, without loading anything.

    Raises:
        ConfigError: something is not there or does not take its arguments, the prompt has no
            place for the question or the tools, the dialect calls other tools than there are or
            one that needs more than it can say, or segment mode has an agent's reward or key.
    """
    if isinstance(config.mode, AgentMode):
        check_whole_turns(config.method)
        _check_access(config.mode)
        for name, tool in config.mode.tools.items():
            with errors_at(f"mode.tools.{name}"):
                check_constructible(tool)
        signatures = {name: ToolSignature(name, "", {}) for name in config.mode.tools}
        check_tools(_dialect(config.mode, signatures), signatures)
    else:
        build_expander(config.mode)
        check_segments(config)
    if isinstance(config.state, FrozenSummaryState):
        with errors_at("state.chat"):
            check_constructible(config.state.chat)
    if isinstance(config.state, KeyState):
        with errors_at("state.function"):
            _check_callable(config.state.function, "state")
    if isinstance(config.method, PrmMethod):
        with errors_at("method.scorer"):
            check_constructible(config.method.scorer)
    for place, tracker in enumerate(config.trackers):
        with errors_at(f"trackers[{place}]"):
            check_constructible(tracker)
    with errors_at("reward"):
        _check_callable(config.reward, "task", "outcome")


def _check_callable(spec: str | Mapping[str, Any], *parameters: str) -> None:
    """As ``callable_of``, as far as can be told without building anything."""
    if isinstance(spec, str):
        callable_of(spec, *parameters)
    else:
        check_constructible(spec)


def build_expander(mode: SegmentMode | AgentMode) -> Expander:
    """Segment mode or agent mode."""
    if isinstance(mode, SegmentMode):
        return SegmentExpander(
            segment_length=mode.segment_length,
            max_response_tokens=mode.max_response_tokens,
            delimiter=mode.delimiter,
            prompt_template=mode.prompt_template,
            system_prompt=mode.system_prompt,
        )
    _check_access(mode)
    tools = {name: _tool(name, spec) for name, spec in mode.tools.items()}
    signatures = {
        name: ToolSignature(name, tool.description, tool.schema) for name, tool in tools.items()
    }
    return TurnExpander(
        dialect=_dialect(mode, signatures),
        tools=tools,
        max_turns=mode.max_turns,
        max_turn_tokens=mode.max_turn_tokens,
        max_observation_tokens=mode.max_observation_tokens,
        max_response_tokens=mode.max_response_tokens,
    )


def _tool(name: str, spec: Mapping[str, Any]) -> Tool:
    with errors_at(f"mode.tools.{name}"):
        tool = constructed(spec, ("run", "name", "description", "schema"))
        if not isinstance(tool.description, str):
            raise ConfigError(f"{spec['class']}: description {tool.description!r:.40} is no text")
        try:
            json.dumps({**tool.schema})
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{spec['class']}: schema is no JSON object: {error}") from None
    return tool


def _check_access(mode: AgentMode) -> None:
    access = mode.tools.get("access", {})
    visits = access.get("class") == "tools.visit:VisitTool"
    if isinstance(mode.dialect, ASearcherDialectConfig) and visits and access.get("extractor"):
        raise ConfigError(
            "mode.tools.access: an extractor needs a goal, which the asearcher dialect cannot "
            "name; leave the extractor out (pages are then shown whole) or use the hermes dialect"
        )


def _dialect(mode: AgentMode, signatures: Mapping[str, ToolSignature]) -> Dialect:
    dialect = mode.dialect
    if isinstance(dialect, SearchR1DialectConfig):
        return SearchR1Dialect(mode.prompt_template, dialect.documents, dialect.compat)
    if isinstance(dialect, ASearcherDialectConfig):
        return ASearcherDialect(mode.prompt_template)
    assert isinstance(dialect, HermesDialectConfig)
    return HermesDialect(signatures, dialect.system_prompt, mode.prompt_template, dialect.documents)
