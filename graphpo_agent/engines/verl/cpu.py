"""verl on a machine without a GPU, for tests and for trying it out.

Loaded by ``import verl`` in every process of a CPU run (``VERL_USE_EXTERNAL_MODULES``). verl knows
no CPU platform: this is one. Ray hands out "GPUs" that only count processes.
"""

# pyright: reportIncompatibleMethodOverride=false, reportAssignmentType=false
# (verl's base class has properties and a generator where plain attributes do)

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as distributed
from torch.distributed import fsdp
from verl.plugin.platform import PlatformBase, PlatformRegistry

__all__ = ["CpuPlatform"]


def _nothing(*_: object, **__: object) -> None:
    return None


def _zero(*_: object, **__: object) -> int:
    return 0


_DEVICE = SimpleNamespace(
    is_available=lambda: False,
    current_device=lambda: "cpu",
    device_count=lambda: 1,
    get_device_name=lambda *_: "cpu",
    mem_get_info=lambda *_: (0, 0),
    manual_seed=torch.manual_seed,
    manual_seed_all=torch.manual_seed,
    get_rng_state=torch.get_rng_state,
    set_rng_state=torch.set_rng_state,
    Stream=torch.cpu.Stream,
    stream=torch.cpu.stream,
    current_stream=torch.cpu.current_stream,
    **dict.fromkeys(
        ("set_device", "synchronize", "empty_cache", "ipc_collect", "reset_peak_memory_stats"),
        _nothing,
    ),
    **dict.fromkeys(
        ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"),
        _zero,
    ),
)
"""What verl asks of ``torch.cuda``, where ``torch.cpu`` has no answer."""


@PlatformRegistry.register("cpu")
class CpuPlatform(PlatformBase):
    """The CPU as verl's accelerator; chosen with ``VERL_PLATFORM=cpu`` only."""

    device_name = "cpu"
    vendor_name = "generic"
    device_module = _DEVICE

    set_device = synchronize = set_allocator_settings = empty_cache = _nothing
    profiler_start = profiler_stop = _nothing

    def is_available(self) -> bool:  # noqa: D102
        return False

    def is_platform_available(self, use_smi_check: bool = False) -> bool:  # noqa: D102
        return False

    def current_device(self) -> Any:  # noqa: D102
        return torch.device("cpu")

    def device_count(self) -> int:  # noqa: D102
        return 1

    def manual_seed(self, seed: int) -> None:  # noqa: D102
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:  # noqa: D102
        return None, None

    def communication_backend_name(self) -> str:  # noqa: D102
        return "gloo"

    def visible_devices_envvar(self) -> str:  # noqa: D102
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:  # noqa: D102
        yield

    def ray_resource_name(self) -> str:  # noqa: D102
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:  # noqa: D102
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        """No: weights reach the servers through shared memory."""
        return False

    def cudart(self) -> None:  # noqa: D102
        return None


def _accept_one_device(start: Any) -> Any:
    """``init_process_group`` that takes verl's "cpu:gloo,<device>:<backend>" for one device too."""

    def init_process_group(backend: Any = None, *arguments: Any, **named: Any) -> Any:
        return start("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *arguments, **named)

    return init_process_group


distributed.init_process_group = _accept_one_device(distributed.init_process_group)


class _Unpinned(fsdp.CPUOffloadPolicy):
    """A reference model's weights wait in plain memory: none can be pinned without a GPU."""

    def __init__(self, pin_memory: bool = True) -> None:
        super().__init__(pin_memory=False)


fsdp.CPUOffloadPolicy = _Unpinned
