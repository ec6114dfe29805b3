"""bm25s, imported as if jax were not installed.

bm25s runs jax as soon as it finds it, and jax then takes three quarters of a GPU's memory. Nothing
here needs it.
"""

import sys

_NAMES = ("jax", "jax.lax")
_imported = {name: sys.modules[name] for name in _NAMES if name in sys.modules}
for _name in _NAMES:
    sys.modules[_name] = None  # pyright: ignore[reportArgumentType] (means: not there)

import bm25s  # noqa: E402

for _name in _NAMES:
    del sys.modules[_name]
sys.modules |= _imported

__all__ = ["bm25s"]
