"""vLLM's worker in a CPU run: takes new weights over again and again, and prompts in pieces.

vLLM's CPU build packs the weights of linear layers and of experts anew for its own kernels and
drops those of the model, so that no second set of weights can be loaded. Here layers keep theirs.

Where a pass ends inside a prompt, vLLM sets the random numbers of the request back by what it drew
for nothing, which those of a CPU cannot be. Here they go on.
"""

from typing import Any

import torch
from torch import nn
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from vllm.model_executor.layers import utils as layers
from vllm.model_executor.layers.fused_moe.cpu_fused_moe import CPUFusedMOE
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from graphpo_agent.engines.vllm_rotation import rotate_heads_together

__all__ = ["CpuWorkerExtension"]


def _unpacked(layer: Any, remove_weight: bool) -> None:
    """In place of vLLM's packing: the plain product."""
    layer.cpu_linear = nn.functional.linear


def _plain_products(experts: Any, layer: Any) -> tuple[bool, str]:
    """In place of vLLM's choice of a kernel for experts: none that wants packed weights."""
    return False, "none"


def _unpadded(experts: Any, layer: Any) -> None:
    """In place of vLLM's: experts keep the size that they have in the model."""


_Experts: Any = CPUFusedMOE
_Runner: Any = GPUModelRunner  # that of a CPU is one, too
_take_down = _Runner._bookkeeping_sync


def _taken_down(runner: Any, *arguments: Any, **named: Any) -> Any:
    """In place of vLLM's: it sees no random numbers that it could set back."""
    batch = runner.input_batch
    generators, batch.generators = batch.generators, {}
    try:
        return _take_down(runner, *arguments, **named)
    finally:
        batch.generators = generators


class CpuWorkerExtension(vLLMColocateWorkerExtension):
    """verl's extension of a vLLM worker (``worker_extension_cls``)."""

    def __new__(cls, **named: Any) -> "CpuWorkerExtension":  # noqa: D102
        layers.dispatch_cpu_unquantized_gemm = _unpacked
        _Experts.check_grouped_gemm = _plain_products
        _Experts._pad_moe_intermediate_for_grouped_gemm = _unpadded
        rotate_heads_together()
        _Runner._bookkeeping_sync = _taken_down
        return super().__new__(cls, **named)

    def update_weights_from_ipc(self, *arguments: Any, **named: Any) -> Any:
        """As verl does; the weights arrive on a device that vLLM's CPU worker does not name."""
        self.device = torch.device("cpu")
        return super().update_weights_from_ipc(*arguments, **named)
