"""A process that compares mathematical expressions; started by ``rewards.math``, which may kill it.

It is run as a file, not as a module: this package is not loaded. Asked
``{"gold": str, "answer": str}``, LaTeX or plain, it answers ``{"equal": bool}``; the protocol is
that of ``graphpo_agent/net/answering.py``.
"""

import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from math_verify import parse, verify
from sympy import Basic, Float, MatrixBase, Rational

__all__ = ["equal"]


def equal(gold: str, answer: str) -> bool:
    r"""Whether math-verify takes the two for the same.

    Decimals are read exactly: in floating point ``10^{40} + 0.5 - 10^{40}`` would equal any number.
    Its own time limits are off: who asks sets one for all.

    Example: ``equal("\\frac{1}{2}", "0.5")``
    """
    return verify(_read(gold), _read(answer), timeout_seconds=None)


def _read(text: str) -> list[Any]:
    found = parse(text if "$" in text else f"${text}$", parsing_timeout=0)
    return [_exact(each) if isinstance(each, Basic | MatrixBase) else each for each in found]


def _exact(expression: Any) -> Any:
    return expression.xreplace({f: Rational(str(f)) for f in expression.atoms(Float)})


def _answer(request: Mapping[str, Any]) -> dict[str, bool]:
    return {"equal": equal(request["gold"], request["answer"])}


if __name__ == "__main__":
    net = Path(__file__).resolve().parents[1] / "net"
    runpy.run_path(str(net / "answering.py"))["answer_requests"](_answer)
