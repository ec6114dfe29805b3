"""Exact nearest vectors by inner product on a GPU, without a GPU build of faiss."""

import numpy as np
import torch
from numpy.typing import NDArray

from graphpo_agent.errors import ToolError, first_line

__all__ = ["TorchFlat"]

_BLOCK_ROWS = 1 << 18


class TorchFlat:
    """All vectors in the memory of one device; threads may share it.

    Takes 2 bytes a number on a GPU (float16), 4 on the CPU. Scores are float32.

    Example::

        scores, rows = TorchFlat(vectors, "cuda").search(queries, topk=3)
    """

    def __init__(self, vectors: NDArray[np.float32], device: str) -> None:
        """Copy [num_docs, dimension] vectors, which may be a mapped file, to the device.

        Raises:
            ToolError: there is no such device, or it has too little memory.
        """
        dtype = torch.float32 if device == "cpu" else torch.float16
        try:
            self._vectors = torch.empty(vectors.shape, dtype=dtype, device=device)
        except (RuntimeError, AssertionError) as error:
            need = vectors.size * dtype.itemsize / 1e9
            raise ToolError(
                f"dense index: {need:.1f} GB of vectors do not go to {device!r}: "
                f"{first_line(error)}"
            ) from error
        for start in range(0, len(vectors), _BLOCK_ROWS):
            block = np.array(vectors[start : start + _BLOCK_ROWS])
            self._vectors[start : start + len(block)] = torch.from_numpy(block)

    @torch.inference_mode()
    def search(
        self, queries: NDArray[np.float32], topk: int
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Scores and row numbers, [num_queries, min(topk, num_docs)] each, best first."""
        wanted = torch.from_numpy(queries).to(self._vectors)
        topk = min(topk, len(self._vectors))
        scores = torch.empty((len(queries), 0), device=wanted.device)
        rows = torch.empty((len(queries), 0), dtype=torch.int64, device=wanted.device)
        for start in range(0, len(self._vectors), _BLOCK_ROWS):
            block = self._vectors[start : start + _BLOCK_ROWS]
            best, at = (wanted @ block.T).float().topk(min(topk, len(block)), dim=1)
            scores, rows = torch.cat([scores, best], 1), torch.cat([rows, at + start], 1)
            scores, kept = scores.topk(min(topk, scores.shape[1]), dim=1)
            rows = rows.gather(1, kept)
        return scores.cpu().numpy(), rows.cpu().numpy()
