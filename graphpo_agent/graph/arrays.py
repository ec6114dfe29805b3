"""Names for the array types of the core."""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["BoolArray", "EmbeddingArray", "Float32Array", "FloatArray", "IntArray"]

IntArray: TypeAlias = NDArray[np.int64]
BoolArray: TypeAlias = NDArray[np.bool_]
FloatArray: TypeAlias = NDArray[np.float64]
Float32Array: TypeAlias = NDArray[np.float32]
EmbeddingArray: TypeAlias = NDArray[np.float32 | np.float64]
