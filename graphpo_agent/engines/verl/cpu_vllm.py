"""vLLM's worker in a CPU run: takes new weights over again and again.

vLLM's CPU build packs the weights of linear layers anew for its own kernels and drops those of the
model, so that no second set of weights can be loaded. Here layers keep theirs.
"""

from typing import Any

import torch
from torch import nn
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from vllm.model_executor.layers import utils as layers

__all__ = ["CpuWorkerExtension"]


def _unpacked(layer: Any, remove_weight: bool) -> None:
    """In place of vLLM's packing: the plain product."""
    layer.cpu_linear = nn.functional.linear


class CpuWorkerExtension(vLLMColocateWorkerExtension):
    """verl's extension of a vLLM worker (``worker_extension_cls``)."""

    def __new__(cls, **named: Any) -> "CpuWorkerExtension":  # noqa: D102
        layers.dispatch_cpu_unquantized_gemm = _unpacked
        return super().__new__(cls, **named)

    def update_weights_from_ipc(self, *arguments: Any, **named: Any) -> Any:
        """As verl does; the weights arrive on a device that vLLM's CPU worker does not name."""
        self.device = torch.device("cpu")
        return super().update_weights_from_ipc(*arguments, **named)
