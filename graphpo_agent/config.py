"""What a run is: pydantic models that refuse unknown keys; ``config_file`` reads them from YAML.

A leaf of the package: no torch, no files.
"""

import math
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from graphpo_agent.config_base import (
    Beta,
    CallableConfig,
    FilePath,
    Gibibytes,
    Natural,
    NonNegative,
    Number,
    ObjectConfig,
    Positive,
    Seed,
    Size,
    Strict,
    Threads,
)
from graphpo_agent.config_methods import MethodConfig
from graphpo_agent.config_state import StateConfig
from graphpo_agent.config_verl import VerlEngineConfig

__all__ = [
    "ASearcherDialectConfig",
    "AgentMode",
    "BudgetConfig",
    "HermesDialectConfig",
    "LocalEngineConfig",
    "LoraConfig",
    "ModelConfig",
    "RunConfig",
    "SamplingConfig",
    "SearchR1DialectConfig",
    "SegmentMode",
    "SftConfig",
    "TrainConfig",
    "UpdateConfig",
    "VerlEngineConfig",
    "VllmEngineConfig",
]

_LARGEST = 1e38
"""Of finite bounds, which float32 numbers are compared with."""


class LoraConfig(Strict):
    """Low-rank adapters, trained in place of the weights; needs the extra ``lora``."""

    rank: Positive = 16
    alpha: Size = 32.0
    """The adapters' product is scaled by alpha / rank."""
    target_modules: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """Names of the adapted linear layers, e.g. ``[q_proj, v_proj]``; None: all but the head."""


class ModelConfig(Strict):
    """The policy's weights."""

    path: FilePath
    """A Hugging Face directory or hub name. A checkpoint of adapters (``lora``) is merged into the
    model that it names."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    device: str = "auto"
    """``auto`` is the GPU where there is one, else the CPU."""
    autocast: bool = False
    """Keep float32 weights and multiply them in bfloat16; the log-softmax stays float32."""
    lora: LoraConfig | None = None
    """Train adapters only; the reference of a KL term is then the model without them."""

    @model_validator(mode="after")
    def _autocast_from_float32(self) -> "ModelConfig":
        if self.autocast and self.dtype != "float32":
            raise ValueError("autocast needs dtype float32")
        return self

    @property
    def vllm_dtype(self) -> str:
        """Of the weights that vLLM samples with."""
        return "bfloat16" if self.autocast else self.dtype


class LocalEngineConfig(Strict):
    """torch and transformers sample."""

    kind: Literal["local"] = "local"
    max_batch_gib: Gibibytes = 1.0
    """Keys and values of the continuations that run at once: copies on a GPU and in 16 bits,
    elsewhere a page of each, beside what they share."""


class VllmEngineConfig(Strict):
    """vLLM samples; the update stays with torch and transformers."""

    kind: Literal["vllm"]
    max_context_tokens: Positive | None = None
    """No context grows longer; None: as long as the model can."""
    max_sequences: Positive = 256
    """Continuations that are decoded together; others wait."""
    block_size: Literal[16, 32, 64, 128] = 16
    """Tokens to a block of keys and values; shared prefixes are kept in whole blocks."""
    kv_cache_gib: Gibibytes = 1.0
    """Memory for keys and values on a CPU."""
    gpu_memory_utilization: Annotated[Number, Field(gt=0, lt=1)] = 0.4
    """Share of the GPU for vLLM's weights, keys and values; the update needs the rest."""


EngineConfig = Annotated[
    LocalEngineConfig | VllmEngineConfig | VerlEngineConfig, Field(discriminator="kind")
]


def _as_tuple(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


Files = Annotated[tuple[FilePath, ...], Field(min_length=1), BeforeValidator(_as_tuple)]


class TasksConfig(Strict):
    """Task files (JSON lines: id, question, answers, metadata)."""

    train: Files
    """A file or several."""
    heldout: FilePath | None = None


class SegmentMode(Strict):
    """Reasoning: an edge is a segment of sampled tokens."""

    kind: Literal["segment"]
    segment_length: Positive
    max_response_tokens: Positive
    delimiter: Annotated[str, Field(min_length=1)] | None = None
    """When set, a segment goes on to the first delimiter at or after ``segment_length`` tokens, at
    most to twice as many."""
    prompt_template: str = "{question}"
    system_prompt: str | None = None


class SearchR1DialectConfig(Strict):
    """``<search>`` and ``<answer>`` in one message."""

    kind: Literal["search_r1"] = "search_r1"
    documents: Literal["search_r1", "verl"] = "search_r1"
    """How they are listed in an observation; a checkpoint knows one way."""
    compat: Literal["none", "search-r1"] = "none"
    """``search-r1``: read and write as Search-R1 does also where that is a defect."""


class ASearcherDialectConfig(Strict):
    """``<search>``, ``<access>`` and ``<answer>`` in a plain text without chat template."""

    kind: Literal["asearcher"]


class HermesDialectConfig(Strict):
    """JSON calls in ``<tool_call>``, replies in ``<tool_response>`` messages."""

    kind: Literal["hermes"]
    documents: Literal["web", "search_r1", "verl"] = "web"
    """How they are listed in an observation."""
    system_prompt: str | None = None
    """Replaces the built-in one; ``{tools}`` becomes the signatures. Empty: no system message."""


def _by_name(value: Any) -> Any:
    return {"kind": value} if isinstance(value, str) else value


DialectConfig = Annotated[
    Annotated[
        SearchR1DialectConfig | ASearcherDialectConfig | HermesDialectConfig,
        Field(discriminator="kind"),
    ],
    BeforeValidator(_by_name),
]
"""A mapping, or the kind alone."""


class AgentMode(Strict):
    """Agentic search: an edge is a ReAct turn, the tool's observation included."""

    kind: Literal["agent"]
    dialect: DialectConfig = SearchR1DialectConfig()
    tools: Annotated[dict[str, ObjectConfig], Field(min_length=1)]
    """By the name that the dialect's action gives, e.g. ``search``."""
    max_turns: Positive
    max_turn_tokens: Positive
    max_observation_tokens: Positive = 500
    max_response_tokens: Positive
    prompt_template: str | None = None
    """Replaces the dialect's own instruction; must hold ``{question}``."""


def _leaves_a_choice(temperature: float) -> float:
    if not 0.01 <= temperature < math.inf:
        raise ValueError(
            "Input should be at least 0.01 and finite; for temperature 0 give eval --greedy"
        )
    return temperature


def _in_single_precision(bound: float) -> float:
    if _LARGEST < bound < math.inf:
        raise ValueError(f"Input should be at most {_LARGEST:g}, or .inf for no bound")
    return bound


class SamplingConfig(Strict):
    """How training rollouts draw tokens."""

    temperature: Annotated[Number, AfterValidator(_leaves_a_choice)] = 1.0
    top_p: Annotated[Number, Field(gt=0, le=1)] = 1.0


class BudgetConfig(Strict):
    """What each prompt of a training step may cost; the same contract for every method.

    A method whose own structure is complete spends the rest on chains from the prompt, as a rule.
    """

    tokens: Positive | None = None
    """Policy tokens; never one more. Summaries and observations are not counted."""
    trajectories: Positive | None = None
    """Paths from the prompt, finished or not."""


class UpdateConfig(Strict):
    """The PPO update (Algorithm 1, stage 4) and its optimiser."""

    learning_rate: Annotated[Number, Field(gt=0, allow_inf_nan=False)] = 1e-6
    warmup_steps: Natural = 0
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    weight_decay: NonNegative = 0.01
    max_grad_norm: Annotated[Number, Field(gt=0)] = 1.0
    minibatch_graphs: Positive
    """Graphs per optimiser step, about: those that have an advantage are dealt out evenly."""
    epochs: Positive = 1
    clip_low: Annotated[Number, Field(gt=0, lt=1)] = 0.2
    clip_high: Annotated[Number, Field(gt=0), AfterValidator(_in_single_precision)] = 0.2
    dual_clip: Annotated[Number, Field(gt=1)] | None = None
    """Where an advantage is negative, a ratio counts up to this; None: however large it is."""
    kl_coefficient: NonNegative = 0.0
    entropy_coefficient: NonNegative = 0.0
    loss_aggregation: Literal["edge_mean", "token_mean", "sequence_mean", "sequence_sum"] = (
        "edge_mean"
    )
    """The paper's, over all tokens, over trained sequences (edges, or trajectories where the method
    trains those), or Dr. GRPO's sum over a sequence divided by the longest response."""
    old_logprobs: Literal["recompute", "rollout"] = "recompute"
    """What ratios are taken against: log-probabilities computed before the first minibatch, or
    those that were recorded while sampling."""
    mismatch_cap: Annotated[Number, Field(ge=1), AfterValidator(_in_single_precision)] | None = None
    """A token's gain is multiplied by its probability under the trainer over that under the
    sampler, up to this (truncated importance sampling); None: it is not."""
    max_tokens_per_batch: Positive = 4096
    """Tokens in one forward pass, or nine eighths of the longest path; bounds memory. A larger
    graph is cut into several passes that compute its prefixes again; a path is never cut. On a CPU
    more is slower, unless prompts are long."""
    gradient_checkpointing: bool = False
    """Keep only each layer's input for the backward pass: less memory, one more forward pass."""
    compile_layers: bool = False
    """Fuse the small operations of each layer with torch.compile, for a GPU: less memory and
    up to an eighth less time, after some seconds of compiling in the first step."""
    offload_optimizer: bool = False
    """Between updates the optimiser's state waits in the CPU's memory; without effect on a CPU."""

    @model_validator(mode="after")
    def _recomputes_what_it_weighs(self) -> "UpdateConfig":
        if self.mismatch_cap is not None and self.old_logprobs == "rollout":
            raise ValueError(
                "mismatch_cap weighs recomputed log-probabilities against the sampler's: set "
                "old_logprobs to recompute, or leave mismatch_cap out"
            )
        return self


class TrainConfig(Strict):
    """How long, how much per step, and what is written when."""

    prompts_per_step: Positive
    steps: Positive | None = None
    token_budget: Positive | None = None
    """Policy tokens generated in training after which the run ends."""
    max_resample: Natural = 2
    """Rounds of other prompts drawn in place of graphs without any advantage."""
    eval_every: Positive = 10
    eval_tasks: Positive = 200
    """The first held-out tasks, for evaluations in training; ``graphpo eval`` takes all."""
    eval_samples: Positive = 1
    checkpoint_every: Positive = 1
    keep_checkpoints: Positive = 2
    """The newest ones; the one with the highest held-out accuracy is kept besides."""

    @model_validator(mode="after")
    def _ends(self) -> "TrainConfig":
        if self.steps is None and self.token_budget is None:
            raise ValueError("needs steps, token_budget or both, or the run would never end")
        return self


class RunConfig(Strict):
    """Everything ``graphpo train``, ``rollout`` and ``eval`` need."""

    output: FilePath
    """The run directory."""
    seed: Seed = 0
    threads: Threads | None = None
    """CPU threads for torch; None leaves torch's own choice, within what a container may use."""
    model: ModelConfig
    engine: EngineConfig = LocalEngineConfig()
    tasks: TasksConfig
    mode: Annotated[SegmentMode | AgentMode, Field(discriminator="kind")]
    state: StateConfig
    reward: CallableConfig
    """A verifier (Task, Outcome) -> number in [0, 1]."""
    method: MethodConfig
    budget: BudgetConfig = BudgetConfig()
    sampling: SamplingConfig = SamplingConfig()
    truncated: Literal["terminal", "early_stopped"] = "terminal"
    """What a path is that reaches its length or turn limit: judged by the verifier, or unscored."""
    outages: Literal["drop", "score"] = "drop"
    """What a finished path is on which a tool met an outage: unscored, or judged all the same."""
    outage_limit: Annotated[Number, Field(gt=0, le=1)] = 0.5
    """Share of a step's (or an evaluation's) tool calls that meet an outage, or of its trajectories
    that are left unscored for one, from which on it ends the run. 1: all of them."""
    overlap: bool = True
    """Tools, embedders and verifiers run beside the sampling. Off: one after another while the
    sampling waits, which makes a run repeatable to the bit."""
    update: UpdateConfig
    train: TrainConfig
    trackers: tuple[ObjectConfig, ...] = ()
    """Who is told of the metrics while ``train`` goes on, beside ``metrics.jsonl``
    (``report.trackers``)."""


class SftConfig(Strict):
    """Everything ``graphpo sft`` needs; it learns with torch and transformers."""

    output: FilePath
    """The directory that receives the warm-started model; until then its steps are kept in
    ``<output>.partial``."""
    seed: Seed = 0
    threads: Threads | None = None
    model: ModelConfig
    demonstrations: FilePath
    observations: bool = False
    """Learn the observations too: a model that starts from nothing learns to copy from them."""
    steps: Positive
    batch_size: Positive
    learning_rate: Annotated[Number, Field(gt=0, allow_inf_nan=False)] = 1e-5
    """Highest; it falls linearly, and would be 0 in the step behind the last."""
    warmup_steps: Natural = 0
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    weight_decay: NonNegative = 0.01
    max_grad_norm: Annotated[Number, Field(gt=0)] = 1.0
    max_tokens_per_batch: Positive = 4096
