"""The tests that a program has to pass, as one text of a task's metadata."""

import base64
import json
import zlib
from dataclasses import dataclass

from graphpo_agent.errors import DataError

__all__ = ["ProgramTests"]


@dataclass(frozen=True, slots=True)
class ProgramTests:
    r"""What goes into a program and what has to come out.

    Example: ``ProgramTests((("1 2\n", "3\n"),))`` for a program that reads and prints,
    ``ProgramTests((("[1, 2]\n3", "true"),), function="has_sum")`` for a function.
    """

    cases: tuple[tuple[str, str], ...]
    """Input and output: standard input and output, or the arguments, a JSON value a line, and the
    result as JSON."""
    function: str | None = None
    """The function, or method of ``Solution``, that is called; None: the program is run."""

    def packed(self) -> str:
        """As one text; tests are long, and a data set has many."""
        content = json.dumps({"function": self.function, "cases": self.cases})
        return base64.b64encode(zlib.compress(content.encode(), 9)).decode()

    @classmethod
    def unpacked(cls, packed: str) -> "ProgramTests":
        """What ``packed`` wrote.

        Raises:
            DataError: it is something else.
        """
        try:
            content = json.loads(zlib.decompress(base64.b64decode(packed, validate=True)))
            cases = tuple((str(given), str(wanted)) for given, wanted in content["cases"])
            if not cases:
                raise ValueError("there are none")
            return cls(cases, content["function"])
        except (ValueError, TypeError, KeyError, zlib.error) as error:
            raise DataError(f"not the packed tests of a program ({error})") from None
