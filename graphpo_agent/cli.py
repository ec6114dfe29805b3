"""The command line: parses, then imports what the verb needs.

Exit status: 0 done, 2 a mistake that one line on stderr explains, 130 interrupted.
"""

import argparse
import errno
import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from typing import Any, NoReturn

from graphpo_agent.cli_data import add_data_verbs
from graphpo_agent.cli_score import add_score_verb
from graphpo_agent.errors import GraphPOError
from graphpo_agent.interrupt import interruptible
from graphpo_agent.machine import limit_threads
from graphpo_agent.stderr_lines import as_line, warn_in_lines

__all__ = ["main"]

_DISK_ERRORS = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EACCES,
    errno.EROFS,
    errno.ENAMETOOLONG,
)
"""What a full or forbidden disk answers; any other operating system error is a bug."""
_MOST_SEEDS = 1000
_SEED_LIMIT = 2**63
_CONFIG_HELP = "a YAML file (see configs/)"
_OVERRIDES_HELP = "settings instead of the file's, or further files"


class _Parser(argparse.ArgumentParser):
    """A usage mistake is one line, like every other mistake."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.set_defaults(parser=self)  # of a verb, its own

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit status."""
    if isinstance(sys.stdout, TextIOWrapper):  # a character its encoding lacks becomes "?"
        sys.stdout.reconfigure(errors="replace")
    options = _parse(arguments)
    warn_in_lines()
    limit_threads()
    with interruptible() as interrupted:
        try:
            return _run(options)
        except BaseException:
            if not interrupted():
                raise
            _fail("interrupted")
            return 130


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse; overrides may stand before and after options."""
    options, rest = _parser().parse_known_args(arguments)
    takes_overrides = "overrides" in options
    strange = [a for a in rest if a.startswith("-") or not (takes_overrides and _is_override(a))]
    if strange:
        options.parser.error(f"unrecognized arguments: {' '.join(strange)}")
    if rest:
        options.overrides = [*options.overrides, *rest]
    return options


def _is_override(argument: str) -> bool:
    """Whether an argument is an override: ``key=value`` or a further configuration file."""
    return "=" in argument or argument.endswith((".yaml", ".yml"))


def _run(options: argparse.Namespace) -> int:
    try:
        _import_from_here()
        return options.run(options)
    except GraphPOError as error:
        return _fail(str(error))
    except BrokenPipeError:  # whoever read the output has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno not in _DISK_ERRORS:
            raise
        where = f" ({error.filename})" if error.filename else ""
        return _fail(f"{error.strerror}{where}; what was complete before is still there")


def _import_from_here() -> None:
    """A configuration may name a user's own module in the working directory."""
    try:
        here = os.getcwd()
    except FileNotFoundError:
        raise GraphPOError("the working directory was deleted: cd to one that exists") from None
    if here not in sys.path:
        sys.path.append(here)


def _fail(message: str) -> int:
    sys.stderr.write(as_line(message))
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="graphpo", description="Train search agents and reasoning models.")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(name: str, help: str) -> argparse.ArgumentParser:
        return verbs.add_parser(name, help=help, description=help)

    _train_arguments(verb("train", "train a policy as a configuration says"))
    _sft_arguments(
        verb("sft", "warm-start a policy on demonstrations; the same command goes on after a kill")
    )
    _rollout_arguments(verb("rollout", "grow graphs with a policy and write them"))
    _eval_arguments(verb("eval", "measure held-out accuracy of a policy"))
    add_score_verb(verb)
    _compare_arguments(verb("compare", "train several methods side by side, with several seeds"))
    _calibrate_arguments(verb("calibrate", "find the merge threshold that merges equal states"))
    _report_arguments(verb("report", "write report.html of a run directory again"))
    add_data_verbs(verb)
    doctor = verb("doctor", "say what is installed, which device is used and what is missing")
    doctor.set_defaults(run=_doctor)
    return parser


def _add_overrides(
    parser: argparse.ArgumentParser, help: str = _OVERRIDES_HELP, metavar: str = "key=value"
) -> None:
    parser.add_argument("overrides", nargs="*", default=[], metavar=metavar, help=help)


def _train_arguments(parser: argparse.ArgumentParser) -> None:
    _add_overrides(
        parser,
        "a YAML file (see configs/; not with --resume), then overrides: train.steps=5 …, or "
        "further files: configs/methods/dapo/as_released.yaml",
        metavar="CONFIG key=value",
    )
    parser.add_argument("--resume", metavar="RUN", help="continue a run directory")
    parser.add_argument("--dry-run", action="store_true", help="print what would run, then stop")
    _engine_argument(parser)
    parser.set_defaults(run=_train)


def _train(options: argparse.Namespace) -> int:
    from graphpo_agent.commands import train

    named = options.overrides or options.resume
    arguments = [*options.overrides, *options.engine] if named else []
    return train(arguments, options.resume, options.dry_run)


def _engine_argument(parser: argparse.ArgumentParser) -> None:
    """``--engine KIND``, short for the override ``engine.kind=KIND``."""
    parser.add_argument(
        "--engine",
        type=_engine_override,
        default=[],
        metavar="{local,vllm}",
        help="what samples: short for engine.kind=…",
    )


def _engine_override(kind: str) -> list[str]:
    if kind not in ("local", "vllm"):
        raise argparse.ArgumentTypeError(f"{kind!r} is neither local nor vllm")
    return [f"engine.kind={kind}"]


def _sft_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help=_CONFIG_HELP)
    _add_overrides(parser)
    parser.set_defaults(run=_sft)


def _sft(options: argparse.Namespace) -> int:
    from graphpo_agent.commands import sft

    return sft(options.config, options.overrides)


def _rollout_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help=_CONFIG_HELP)
    _add_overrides(parser)
    parser.add_argument("--tasks", metavar="FILE", help="instead of the configuration's train file")
    parser.add_argument("--count", type=_count, default=8, help="how many tasks (8)")
    parser.add_argument(
        "--out",
        required=True,
        metavar="FILE",
        help="graphpo.graph/1 lines; the same command goes on where it was interrupted",
    )
    _engine_argument(parser)
    parser.set_defaults(run=_rollout)


def _rollout(options: argparse.Namespace) -> int:
    from graphpo_agent.commands import rollout

    overrides = [*options.overrides, *options.engine]
    return rollout(options.config, overrides, options.tasks, options.count, options.out)


def _eval_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help=_CONFIG_HELP)
    _add_overrides(parser)
    parser.add_argument("--tasks", metavar="FILE", help="instead of the held-out file")
    parser.add_argument("--samples", type=_count, default=1, help="trajectories per task (1)")
    parser.add_argument("--greedy", action="store_true", help="temperature 0")
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="one JSON line per trajectory; the same command goes on where it was interrupted",
    )
    _engine_argument(parser)
    parser.set_defaults(run=_eval)


def _eval(options: argparse.Namespace) -> int:
    from graphpo_agent.commands import evaluate_policy

    return evaluate_policy(
        options.config,
        [*options.overrides, *options.engine],
        options.tasks,
        options.samples,
        options.greedy,
        options.out,
    )


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _compare_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="the configuration that all methods share")
    _add_overrides(
        parser, "applied after each method's file: train.token_budget=200000 …, or further files"
    )
    parser.add_argument(
        "--methods",
        nargs="+",
        required=True,
        metavar="NAME|FILE",
        help="the first is what the others are compared with; grpo, grpo/as_released (see "
        "configs/methods/) or a YAML file",
    )
    parser.add_argument(
        "--seeds",
        type=_seeds,
        default=range(5),
        metavar="N|FIRST-LAST",
        help="5: seeds 0 to 4 (5); 20-24: those",
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="what is complete in it stays")
    parser.add_argument("--jobs", type=_count, default=1, help="runs at once (1)")
    _engine_argument(parser)
    parser.set_defaults(run=_compare)


def _seeds(text: str) -> range:
    first, dash, last = text.partition("-")
    numbers = (first, last) if dash else (text,)
    if not all(number.isdecimal() for number in numbers):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of seeds nor FIRST-LAST")
    seeds = range(int(first), int(last) + 1) if dash else range(int(text))
    if not seeds:
        raise argparse.ArgumentTypeError(f"{text!r} is no seed at all")
    if seeds[-1] >= _SEED_LIMIT:
        raise argparse.ArgumentTypeError(f"{text!r}: a seed is below 2**63")
    if seeds[-1] - seeds[0] >= _MOST_SEEDS:
        raise argparse.ArgumentTypeError(f"{text!r} is more than {_MOST_SEEDS} seeds")
    return seeds


def _compare(options: argparse.Namespace) -> int:
    from graphpo_agent.compare import compare_command

    methods = [word for word in options.methods if "=" not in word]
    overrides = [word for word in options.methods if "=" in word]  # behind --methods
    return compare_command(
        options.config,
        [*options.overrides, *overrides, *options.engine],
        methods,
        options.seeds,
        options.out,
        options.jobs,
    )


def _calibrate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="the configuration that grew the graphs")
    parser.add_argument("graphs", help="graphpo.graph/1 lines with tokens, as rollout writes them")
    _add_overrides(parser)
    parser.add_argument("--tasks", metavar="FILE", help="instead of the configuration's files")
    parser.add_argument(
        "--states",
        action="append",
        default=[],
        metavar="FILE|NAME=STATE",
        help="further ways to describe states: a YAML mapping of names, or one of them",
    )
    parser.add_argument("--reference", metavar="NAME", help="whose keys say what is the same")
    parser.add_argument("--continuations", type=_count, default=16, help="per state (16)")
    parser.add_argument("--pairs", type=_count, default=400, help="per way to describe (400)")
    parser.add_argument(
        "--thresholds",
        type=float,
        nargs="+",
        metavar="KAPPA",
        help="similarities to try, each in (0, 1] (14 from 0.5 to 1)",
    )
    parser.add_argument("--tolerance", type=float, default=0.3, help="of the spread (0.3)")
    parser.add_argument("--out", required=True, metavar="DIR", help="a new directory")
    _engine_argument(parser)
    parser.set_defaults(run=_calibrate)


def _calibrate(options: argparse.Namespace) -> int:
    from graphpo_agent.calibrate import calibrate_command
    from graphpo_agent.evals.calibrate import THRESHOLDS, CalibrateOptions

    chosen = CalibrateOptions(
        continuations=options.continuations,
        pairs=options.pairs,
        thresholds=tuple(options.thresholds or THRESHOLDS),
        tolerance=options.tolerance,
        reference=options.reference,
    )
    overrides = [*options.overrides, *options.engine]
    return calibrate_command(
        options.config,
        overrides,
        options.graphs,
        options.tasks,
        options.states,
        chosen,
        options.out,
    )


def _report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_directory", metavar="RUN", help="the directory of a run")
    parser.set_defaults(run=_report)


def _report(options: argparse.Namespace) -> int:
    from graphpo_agent.commands import report

    return report(options.run_directory)


def _doctor(options: argparse.Namespace) -> int:
    from graphpo_agent.doctor import doctor

    return doctor()


if __name__ == "__main__":
    sys.exit(main())
