"""A run's configuration as verl's: the one place where settings are translated."""

import math
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from graphpo_agent.build_method import build_method
from graphpo_agent.config import RunConfig, VerlEngineConfig
from graphpo_agent.config_methods import (
    GraphPOMethod,
    MethodConfig,
    OwnMethod,
    PrmMethod,
    ProsMethod,
    TreeMethod,
)
from graphpo_agent.engines.local.adapter_files import under_adapters
from graphpo_agent.engines.local.model import dropouts
from graphpo_agent.engines.minibatches import num_minibatches
from graphpo_agent.engines.verl.overrides import check_overrides
from graphpo_agent.errors import ConfigError

__all__ = [
    "advantage_terms",
    "check_settings",
    "model_fields",
    "verl_engine",
    "verl_settings",
]

_NEVER = 1e9
"""A dual clip that never takes hold: verl's ratios end at exp(20) = 5e8."""
_SYNC_SECONDS = 600.0
"""How long the servers may take to take new weights."""
_PLAIN_ATTENTION = {
    "actor_rollout_ref.model.use_remove_padding": False,
    "+actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
}
"""A model without flash-attn's kernels."""
_SHARING = {"actor_rollout_ref.model.external_lib": "graphpo_agent.engines.verl.engine"} | (
    _PLAIN_ATTENTION
)
"""Loads our engine, which brings its own attention."""
_CPU_WORKER = "graphpo_agent.engines.verl.cpu_vllm.CpuWorkerExtension"


def verl_engine(config: RunConfig) -> VerlEngineConfig:
    """The engine's settings of a run through verl."""
    assert isinstance(config.engine, VerlEngineConfig)
    return config.engine


def check_settings(config: RunConfig) -> None:
    """Check that a run's settings have a meaning in verl.

    Raises:
        ConfigError: one has none.
    """
    engine, update, train = verl_engine(config), config.update, config.train
    method, lora = config.method, config.model.lora
    refusals = {
        "method pros keeps a pool of prefixes over all prompts: use engine.kind local or vllm": (
            isinstance(method, ProsMethod)
        ),
        f"method {method.name} whitens over a batch, and verl's workers see one prompt each: set "
        "method.whiten=none, or use engine.kind local or vllm": (
            build_method(method).whiten == "batch"
        ),
        "every rollout worker of verl would load method.scorer's model: serve the model and name a "
        "scorer that asks it (graphpo_agent.rewards.prm:VllmStepScorer)": _loads_scorer(method),
        "verl draws no other prompts in place of graphs without an advantage: set "
        "train.max_resample=0": train.max_resample > 0,
        "verl ends by steps: set train.steps, and no train.token_budget": (
            train.steps is None or train.token_budget is not None
        ),
        "model.lora with engine.share_prefixes=false: adapters are our engine's, set it to true": (
            lora is not None and not engine.share_prefixes
        ),
        "verl cannot divide an embedding with adapters: leave embed_tokens out of "
        "model.lora.target_modules": _adapts_embeddings(config),
        "verl takes whole numbers alone as model.lora.alpha": (
            lora is not None and lora.alpha % 1 != 0
        ),
        f"model.path {config.model.path} holds adapters, and verl starts from whole weights: name "
        "the model/ of a run that has ended": bool(under_adapters(config.model.path)[1]),
        f"model.dtype {config.model.dtype}: verl keeps float32 weights; model.autocast multiplies "
        "them in bfloat16": config.model.dtype != "float32",
        "update.old_logprobs rollout with sampling.top_p below 1: verl's servers give "
        "log-probabilities after truncation; set update.old_logprobs=recompute": (
            update.old_logprobs == "rollout" and config.sampling.top_p < 1
        ),
        "update.mismatch_cap with sampling.top_p below 1: verl's servers give log-probabilities "
        "after truncation; leave one of them out": (
            update.mismatch_cap is not None and config.sampling.top_p < 1
        ),
        "update.compile_layers is the local engine's own: leave it out": update.compile_layers,
        f"model.device {config.model.device}: verl gives every process a device of its own; set "
        "model.device to cuda or cpu": config.model.device not in ("auto", "cuda", "cpu"),
        f"engine.nodes {engine.nodes} needs a Ray cluster that runs on them: set "
        "engine.ray_address": engine.nodes > 1 and engine.ray_address is None,
        f"{engine.nodes} × {engine.gpus_per_node} GPUs are not divisible by engine.tensor_parallel "
        f"{engine.tensor_parallel}": engine.nodes * engine.gpus_per_node % engine.tensor_parallel
        != 0,
        f"engine.max_context_tokens {engine.max_context_tokens} leaves no room for a prompt beside "
        f"mode.max_response_tokens {config.mode.max_response_tokens}": (
            engine.max_context_tokens <= config.mode.max_response_tokens
        ),
    }
    for reason, refused in refusals.items():
        if refused:
            raise ConfigError(f"engine.kind verl: {reason}")
    check_overrides(engine.overrides)


def _adapts_embeddings(config: RunConfig) -> bool:
    lora = config.model.lora
    names = () if lora is None else lora.target_modules or ()
    return any(name.rpartition(".")[2] == "embed_tokens" for name in names)


def _loads_scorer(method: MethodConfig) -> bool:
    if not isinstance(method, PrmMethod):
        return False
    return str(method.scorer["class"]).startswith("graphpo_agent.prm_local")


def advantage_terms(method: MethodConfig) -> int:
    """How many advantages an edge has that are clipped apart."""
    if isinstance(method, OwnMethod):
        return method.terms
    separate = isinstance(method, GraphPOMethod | TreeMethod) and method.objective == "separate"
    return 2 if separate else 1


def verl_settings(
    config: RunConfig,
    run: Path,
    device: str,
    worker: str,
    config_text: str,
    resume: bool = False,
    fields: Mapping[str, Any] = {},
    serving: Mapping[str, Any] = {},
    left_out: Sequence[int] = (),
    largest_weight: int = 0,
) -> dict[str, Any]:
    """Verl's settings by their dotted names; ``+`` before a name that verl does not know itself.

    Args:
        config: checked with ``check_settings``.
        run: the run directory, which every node sees under the same name.
        device: ``cuda`` or ``cpu``.
        worker: ``module:function``, from the configuration's text to a ``GraphWorker``.
        config_text: the resolved configuration.
        resume: the run goes on; what it began with is not evaluated again.
        fields: of the model's configuration; see ``model_fields``.
        serving: what vLLM is told of the model.
        left_out: places of the training tasks that are not drawn.
        largest_weight: bytes of the model's largest one; of a CPU's run.
    """
    settings = _run_settings(config, run) | _model_settings(config) | _update_settings(config)
    settings |= _rollout_settings(config)
    if verl_engine(config).share_prefixes:
        settings |= _SHARING
    elif not _has_flash_attention():
        settings |= _PLAIN_ATTENTION
    override = "+actor_rollout_ref.model.override_config"
    settings |= {f"{override}.{name}": value for name, value in fields.items()}
    vllm = "+actor_rollout_ref.rollout.engine_kwargs.vllm"
    settings |= {f"{vllm}.{name}": value for name, value in serving.items()}
    settings["+data.left_out"] = list(left_out)
    settings["trainer.device"] = device
    settings["trainer.val_before_train"] = config.tasks.heldout is not None and not resume
    if device == "cpu":
        settings |= _cpu_settings(largest_weight)
    own = {
        "run": str(run),
        "worker": worker,
        "config": config_text,
        "steps": config.train.steps,
        "seed": config.seed,
        "minibatch_graphs": config.update.minibatch_graphs,
        "terms": advantage_terms(config.method),
        "kl": config.update.kl_coefficient,
        "entropy": config.update.entropy_coefficient,
        "mismatch_cap": config.update.mismatch_cap,
        "sync_seconds": _SYNC_SECONDS,
        "outage_limit": config.outage_limit,
        "shares_prefixes": verl_engine(config).share_prefixes,
    }
    return settings | {"+graphpo": own}


def model_fields(stored: PretrainedConfig) -> dict[str, Any]:
    """The fields of a model's configuration with which verl trains what the local engine does.

    verl updates in training mode, and what is dropped then would make the importance ratios noise.
    It names the tokenizer's padding token, or the token that ends a turn where there is none, as
    the model's, which would not train that token's embedding.

    Args:
        stored: the model's configuration.
    """
    padding = getattr(stored, "pad_token_id", None)
    return dict.fromkeys(dropouts(stored), 0.0) | {"pad_token_id": padding}


def _has_flash_attention() -> bool:
    """Whether verl's own kernels can be used, which its extra for vLLM does not install."""
    return find_spec("flash_attn") is not None


def _run_settings(config: RunConfig, run: Path) -> dict[str, Any]:
    engine, train = verl_engine(config), config.train
    files = [str(Path(name).resolve()) for name in config.tasks.train]
    heldout = config.tasks.heldout
    return {
        "trainer.nnodes": engine.nodes,
        "trainer.n_gpus_per_node": engine.gpus_per_node,
        "trainer.total_training_steps": train.steps,
        "trainer.total_epochs": train.steps,  # never the first to end
        "trainer.logger": [],
        "trainer.project_name": "graphpo",
        "trainer.experiment_name": run.name,
        "trainer.default_local_dir": str(run / "checkpoints"),
        "trainer.save_freq": train.checkpoint_every,
        # It deletes the only one before the next is whole.
        "trainer.max_actor_ckpt_to_keep": max(2, train.keep_checkpoints),
        "trainer.resume_mode": "auto",
        "trainer.test_freq": train.eval_every if heldout is not None else -1,
        "trainer.v1.trainer_mode": "graphpo",
        "data.custom_cls.path": "pkg://graphpo_agent.engines.verl.dataset",
        "data.custom_cls.name": "TaskDataset",
        "data.train_files": files,
        "data.val_files": files if heldout is None else [str(Path(heldout).resolve())],
        "data.val_max_samples": train.eval_tasks,
        "data.train_batch_size": train.prompts_per_step,
        "data.seed": config.seed,
        "data.dataloader_num_workers": 0,
        "reward.num_workers": 1,
        "algorithm.adv_estimator": "grpo",  # the advantages are ours
        "critic.enable": False,
        "algorithm.rollout_correction.bypass_mode": config.update.old_logprobs == "rollout",
    }


def _model_settings(config: RunConfig) -> dict[str, Any]:
    update = config.update
    compute = "bf16" if config.model.autocast else "fp32"
    precision = {"param_dtype": compute, "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    settings: dict[str, Any] = {
        "actor_rollout_ref.model.path": config.model.path,
        "actor_rollout_ref.model.enable_gradient_checkpointing": update.gradient_checkpointing,
        "actor_rollout_ref.actor.fsdp_config.optimizer_offload": update.offload_optimizer,
    }
    if (lora := config.model.lora) is not None:
        names = "all-linear" if lora.target_modules is None else list(lora.target_modules)
        settings |= {
            "actor_rollout_ref.model.lora_rank": lora.rank,
            "actor_rollout_ref.model.lora_alpha": int(lora.alpha),
            "actor_rollout_ref.model.target_modules": names,
            "actor_rollout_ref.model.lora.merge": True,
            "+actor_rollout_ref.actor.checkpoint.save_lora_only": True,
        }
    for part in ("actor", "ref"):
        place = f"actor_rollout_ref.{part}"
        settings[f"{place}.strategy"] = settings[f"{place}.fsdp_config.strategy"] = "fsdp2"
        settings[f"{place}.fsdp_config.model_dtype"] = "fp32"
        settings[f"+{place}.fsdp_config.mixed_precision"] = precision
    return settings


def _update_settings(config: RunConfig) -> dict[str, Any]:
    update, engine = config.update, verl_engine(config)
    tokens = max(update.max_tokens_per_batch, engine.max_context_tokens)
    steps = update.epochs * num_minibatches(config.train.prompts_per_step, update.minibatch_graphs)
    actor, kept = "actor_rollout_ref.actor", ["model", "optimizer", "extra"]
    adapters = config.model.lora is not None  # our engine saves the model that they make
    return {
        f"{actor}.optim.lr": update.learning_rate,
        f"{actor}.optim.betas": list(update.betas),
        f"{actor}.optim.weight_decay": update.weight_decay,
        f"{actor}.optim.lr_warmup_steps": math.ceil(update.warmup_steps / steps),
        f"{actor}.optim.clip_grad": update.max_grad_norm,
        f"{actor}.grad_clip": update.max_grad_norm,
        f"{actor}.ppo_epochs": update.epochs,
        f"{actor}.ppo_mini_batch_size": config.train.prompts_per_step,  # set anew in every step
        f"{actor}.clip_ratio_low": update.clip_low,
        f"{actor}.clip_ratio_high": update.clip_high,
        f"{actor}.clip_ratio_c": update.dual_clip or _NEVER,
        f"{actor}.use_kl_loss": update.kl_coefficient > 0,  # keeps a reference model
        f"{actor}.calculate_entropy": update.entropy_coefficient != 0,
        f"{actor}.use_dynamic_bsz": True,
        f"{actor}.ppo_max_token_len_per_gpu": tokens,
        f"{actor}.checkpoint.save_contents": [*kept, *([] if adapters else ["hf_model"])],
        f"{actor}.checkpoint.load_contents": kept,
    }


def _rollout_settings(config: RunConfig) -> dict[str, Any]:
    engine = verl_engine(config)
    rollout = "actor_rollout_ref.rollout"
    response = config.mode.max_response_tokens
    return {
        "data.max_prompt_length": engine.max_context_tokens - response,
        "data.max_response_length": response,
        f"{rollout}.name": "vllm",
        f"{rollout}.n": 1,
        f"{rollout}.val_kwargs.n": config.train.eval_samples,
        f"{rollout}.temperature": config.sampling.temperature,
        f"{rollout}.top_p": config.sampling.top_p,
        f"{rollout}.dtype": config.model.vllm_dtype,
        f"{rollout}.tensor_model_parallel_size": engine.tensor_parallel,
        f"{rollout}.gpu_memory_utilization": engine.gpu_memory_utilization,
        f"{rollout}.max_model_len": engine.max_context_tokens,
        f"{rollout}.max_num_seqs": engine.max_sequences,
        f"{rollout}.calculate_log_probs": True,
        f"{rollout}.agent.num_workers": engine.grower_processes,
        f"{rollout}.agent.default_agent_loop": "graphpo",
        f"+{rollout}.engine_kwargs.vllm.block_size": 16,
    }


def _cpu_settings(largest_weight: int) -> dict[str, Any]:
    """What verl and vLLM cannot do on a CPU is switched off; weights go through shared memory."""
    rollout = "actor_rollout_ref.rollout"
    return {
        **_PLAIN_ATTENTION,
        "actor_rollout_ref.actor.use_torch_compile": False,
        "actor_rollout_ref.actor.fsdp_config.use_torch_compile": False,
        "actor_rollout_ref.ref.use_torch_compile": False,
        "actor_rollout_ref.ref.fsdp_config.use_torch_compile": False,
        f"{rollout}.enforce_eager": True,
        f"{rollout}.load_format": "auto",
        f"{rollout}.free_cache_engine": False,
        f"+{rollout}.enable_sleep_mode": False,
        f"{rollout}.checkpoint_engine.update_weights_bucket_megabytes": max(
            64, -(-largest_weight // 2**20)
        ),
        f"+{rollout}.engine_kwargs.vllm.worker_extension_cls": _CPU_WORKER,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
    }
