"""A process that compares mathematical expressions; started by ``rewards.math``, which may kill it.

It is run as a file, not as a module: this package is not loaded. Asked
``{"gold": str, "answer": str}``, LaTeX or plain, it answers ``{"equal": bool}``; the protocol is
that of ``graphpo_agent/net/answering.py``.
"""

import re
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from latex2sympy2_extended.latex2sympy2 import _Latex2Sympy
from latex2sympy2_extended.logic import And
from math_verify import LatexExtractionConfig, parse, verify
from sympy import Basic, Expr, Float, MatrixBase, Rational
from sympy.concrete.expr_with_limits import ExprWithLimits
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational

__all__ = ["equal"]

_EQUALS = re.compile(r"(?:(?<![<>!])=|\\equiv)(?![^{]*\}|[^()]*\))")
"""But those inside braces and parentheses."""
_FRACTION = re.compile(r"\\[dtc]?frac(?:\{\d+\}|\d)(?:\{\d+\}|\d)")
_DIGITS = 1000
"""That equal numbers share; an answer has fewer."""
_DIGITS_OF_SUMS = 15
"""The same, of sums and integrals: more would take too long."""


_convert_product = _Latex2Sympy.convert_postfix_list


def _product(self: Any, factors: Any, start: int = 0) -> Any:
    r"""What stands side by side: ``2(3)`` is 6, and ``2\frac{1}{2}`` alone a mixed number.

    The parser adds any positive fraction to the integer before it, ``3`` to ``2`` as well.
    """
    left, *others = factors[start:]
    is_mixed = len(others) == 1 and left.getText().isdigit()
    if not others or (is_mixed and _FRACTION.fullmatch(others[0].getText())):
        return _convert_product(self, factors, start)
    first = self.convert_postfix(left)
    if not isinstance(first, Expr | MatrixBase):  # a derivative of what follows
        return _convert_product(self, factors, start)
    rest = self.convert_postfix_list(factors, start + 1)
    of_matrices = isinstance(first, MatrixBase) or isinstance(rest, MatrixBase)
    return self.mat_mul_flat(first, rest) if of_matrices else self.mul_flat(first, rest)


_Latex2Sympy.convert_postfix_list = _product  # pyright: ignore[reportAttributeAccessIssue]


def equal(gold: str, answer: str) -> bool:
    r"""Whether math-verify takes the two for the same.

    Decimals are read exactly: in floating point ``10^{40} + 0.5 - 10^{40}`` would equal any number.
    An answer that equates different numbers equals nothing, and so does what cannot be read as a
    whole. Its own time limits are off: who asks sets one for all.

    Example: ``equal("\\frac{1}{2}", "0.5")``
    """
    return _holds(answer) and _same(_read(gold), _read(answer) or _read_value(answer))


def _holds(text: str) -> bool:
    """Whether all sides of an equation can be read, but for its name, and its numbers are one."""
    if re.search("[,;]", text):
        return True
    sides = _EQUALS.split(text)
    read = [_read(side) for side in sides]
    if len(sides) > 2 and not all(read[1:]):
        return False  # math-verify would take the last one
    numbers = [found for side, found in zip(sides, read, strict=True) if _is_number(side, found)]
    return all(_same(numbers[0], other) for other in numbers[1:])


def _is_number(text: str, found: list[Any]) -> bool:
    """Not a name, such as that of an eccentricity, ``e``."""
    unknown = any(each.free_symbols or each.atoms(AppliedUndef) for each in found)
    return bool(found) and not unknown and re.search(r"\d", text) is not None


def _read_value(text: str) -> list[Any]:
    r"""What something equals whose name cannot be read, as in ``P(\text{red}) = \frac{3}{5}``."""
    name, *values = _EQUALS.split(text)
    return [] if not values or re.search(r"[\d,;]", name) else _read(values[-1])


def _read(text: str) -> list[Any]:
    found = parse(f"${text}$", [LatexExtractionConfig()], "no_fallback", parsing_timeout=0)
    return [_exact(each) for each in found if isinstance(each, Basic | MatrixBase)]


def _same(golds: list[Any], answers: list[Any]) -> bool:
    sums = any(each.has(ExprWithLimits) for each in golds + answers)
    digits = _DIGITS_OF_SUMS if sums else _DIGITS
    return verify(golds, answers, numeric_precision=digits, timeout_seconds=None)


def _exact(expression: Any) -> Any:
    """The same with fractions for decimals; ``3/4 = 0.75`` stays an equation, if a true one."""
    if not expression.has(Relational):
        return expression.xreplace({f: Rational(str(f)) for f in expression.atoms(Float)})
    if isinstance(expression, Relational):
        return expression.func(*map(_exact, expression.args), evaluate=False)
    parts = expression.args
    if isinstance(expression, And):
        parts = expression._unsorted_args  # pyright: ignore[reportAttributeAccessIssue]
    return expression.func(*map(_exact, parts))


def _answer(request: Mapping[str, Any]) -> dict[str, bool]:
    return {"equal": equal(request["gold"], request["answer"])}


if __name__ == "__main__":
    net = Path(__file__).resolve().parents[1] / "net"
    runpy.run_path(str(net / "answering.py"))["answer_requests"](_answer)
