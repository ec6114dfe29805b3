"""The command line of ``score``: every method's settings as flags."""

import argparse
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from graphpo_agent.methods import METHODS
from graphpo_agent.stderr_lines import as_line

__all__ = ["add_score_verb"]

T = TypeVar("T", int, float)


def add_score_verb(verb: Callable[[str, str], argparse.ArgumentParser]) -> None:
    """Add it to a command line.

    Args:
        verb: from a name and a help text to the parser of its arguments.
    """
    parser = verb("score", "credit the graphs of a file with a method")
    parser.add_argument("input", help="graphpo.graph/1 lines")
    parser.add_argument("--out", required=True, metavar="FILE", help="one JSON line per graph")
    parser.add_argument("--method", required=True, choices=METHODS, help="whose credit")
    parser.add_argument(
        "--keep-classes",
        action="store_true",
        help="graphpo: merge as the file's classes say, where every node of a graph has one",
    )
    settings = parser.add_argument_group(
        "settings of the methods",
        "without them as the method's authors released it, but not whitened, and dapo without its "
        "penalty on overlong answers",
    )

    def setting(name: str, **how: Any) -> None:
        settings.add_argument(name, default=argparse.SUPPRESS, **how)

    _add_graph_settings(setting)
    _add_other_settings(setting)
    parser.set_defaults(run=_score)


def _add_graph_settings(setting: Callable[..., None]) -> None:
    """Those that only ``graphpo`` and ``tree`` have."""
    setting("--merge", choices=["similarity", "none"], help="graphpo, tree, as all up to …-weight")
    setting("--merge-threshold", type=float, help="the similarity from which nodes merge (0.92)")
    setting(
        "--merge-terminals",
        choices=["same_reward", "never"],
        help="which terminals merge (same_reward)",
    )
    setting(
        "--max-layer-gap",
        type=_whole_or_none,
        metavar="N|none",
        help="largest difference of depth in a class (none)",
    )
    setting(
        "--guard",
        choices=["numbers", "none"],
        help="numbers: states with other numbers never merge (none)",
    )
    setting("--pool-weight", type=float, help="of equivalent nodes' terminals, 0 to 1 (0.7)")
    setting("--efficiency-weight", type=float, help="of the efficiency advantage (0.2)")
    setting(
        "--efficiency-combine",
        choices=["mean", "sum"],
        help="over the efficiency paths of an edge (mean)",
    )
    setting(
        "--backup",
        choices=["leaf", "mean", "class"],
        help="counts rise over leaves, children or a class's edges (leaf)",
    )
    setting("--trajectory-weight", type=float, help="of the trajectory advantage (0)")


def _add_other_settings(setting: Callable[..., None]) -> None:
    """Those of single methods, and those of which several have some values."""
    setting(
        "--singleton",
        choices=["zero", "inherit", "raw"],
        help="an edge alone: graphpo, tree (zero), spo_tree, treerpo (inherit): zero, inherit; a "
        "trajectory alone: grpo, dapo, tree_grpo (raw): raw, zero",
    )
    setting(
        "--normalize",
        choices=["std", "none", "rms"],
        help="graphpo, tree: all; grpo, treerpo, spo_tree: std, none",
    )
    setting("--max-length", type=int, help="dapo")
    setting("--overlong-buffer", type=int, help="dapo")
    setting("--overlong-factor", type=float, help="dapo")
    setting("--select", type=_whole_or_none, metavar="N|none", help="treerl: leaves trained (16)")
    setting("--weighting", choices=["sqrt", "uniform", "paper"], help="treerl")
    setting(
        "--drop-zero",
        action=argparse.BooleanOptionalAction,
        help="spo_tree: edges with advantage 0 are not trained, which counts for whitening (on)",
    )
    setting("--max-probability", type=_number_or_none, metavar="P|none", help="spo_tree, spo_chain")
    setting("--kept", type=_whole_or_none, metavar="N|none", help="tree_grpo: leaves of a tree")
    setting("--aggregate", choices=["average", "group_size"], help="treepo")
    setting("--steps", choices=["response", "edges"], help="prm")
    setting("--prm-weight", type=float, help="prm")
    setting("--whiten", choices=["none", "batch"], help="spo_tree, spo_chain, treepo")


def _whole_or_none(text: str) -> int | None:
    return None if text == "none" else _number(text, int)


def _number_or_none(text: str) -> float | None:
    return None if text == "none" else _number(text, float)


def _number(text: str, kind: type[T]) -> T:
    try:
        return kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor none") from None


def _score(options: argparse.Namespace) -> int:
    from graphpo_agent.methods.score import OPTIONS, score_file

    given = {name: value for name, value in vars(options).items() if name in OPTIONS}
    note = score_file(options.input, options.out, options.method, given, options.keep_classes)
    if note is not None:
        sys.stderr.write(as_line(note))
    return 0
