"""The command line of the verbs about data and documents: ``data grade index serve``."""

import argparse
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path

from graphpo_agent.data import KINDS
from graphpo_agent.evals import GRADERS
from graphpo_agent.outputs import check_apart

__all__ = ["add_data_verbs"]

_INDEX_KINDS = ("bm25", "lucene", "dense")
_OPTIONS_HELP = "options of the kind, listed in docs/retrieval.md and by a wrong one"
_TRANSCRIPTS_HELP = (
    'JSON lines: {"id", "response", "gold", "prompt"}; a judge needs "question", too, and code '
    '"tests" in its "metadata"'
)
_INDEX_OUT_HELP = "where the index goes; one that is there is replaced"


def add_data_verbs(verb: Callable[[str, str], argparse.ArgumentParser]) -> None:
    """Add them to a command line.

    Args:
        verb: from a name and a help text to the parser of its arguments.
    """
    _data_arguments(verb("data", "prepare public data sets, generate the toy worlds"))
    _grade_arguments(verb("grade", "run a reward on the transcripts of a file"))
    _index_arguments(verb("index", "build, describe or merge search indexes over a corpus"))
    _serve_arguments(verb("serve", "answer searches over HTTP, as Search-R1's servers do"))


def _data_arguments(parser: argparse.ArgumentParser) -> None:
    action = _actions(parser)
    _prepare_arguments(action("prepare", "public files to tasks"))
    toy = action("toy", "a generated world: tasks, demonstrations, corpus, untrained policy")
    toy.add_argument("world", choices=["kb", "hops", "reach", "trace"], help="which world")
    toy.add_argument("output", help="the directory that receives it; a world that is there stays")
    toy.add_argument(
        "knobs",
        nargs="*",
        default=[],
        metavar="knob=value",
        help="difficulty and sizes: hops=1 seed=3 …; a wrong one lists all",
    )
    toy.set_defaults(run=_toy)


def _actions(parser: argparse.ArgumentParser) -> Callable[[str, str], argparse.ArgumentParser]:
    """Give a verb actions; what it returns adds one, from its name and help text."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    return lambda name, help: actions.add_parser(name, help=help, description=help)


def _toy(options: argparse.Namespace) -> int:
    from graphpo_agent.commands import toy

    return toy(options.world, options.output, options.knobs)


def _prepare_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", choices=KINDS, help="whose files")
    parser.add_argument(
        "files",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="JSON lines, JSON arrays, CSV or parquet",
    )
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="task file")
    parser.add_argument(
        "--exclude",
        nargs="+",
        type=Path,
        default=[],
        metavar="FILE",
        help="evaluation files; a training row with one of their questions is left out",
    )
    parser.add_argument(
        "--keep-unanswerable", action="store_true", help="rows that have no answer by design"
    )
    parser.add_argument(
        "--parquet", type=Path, metavar="FILE", help="the tasks for another trainer, too"
    )
    parser.add_argument(
        "--parquet-for",
        choices=["verl", "search-r1", "tree-grpo"],
        help="whose trainer and scorer read the parquet file (verl)",
    )
    parser.add_argument(
        "--demonstrations", type=Path, metavar="FILE", help="recorded trajectories, for sft"
    )
    parser.set_defaults(run=_prepare)


def _prepare(options: argparse.Namespace) -> int:
    from graphpo_agent.data_commands import prepare

    return prepare(
        options.source,
        options.files,
        out=options.out,
        exclude=options.exclude,
        keep_unanswerable=options.keep_unanswerable,
        parquet=options.parquet,
        parquet_for=options.parquet_for,
        demonstrations=options.demonstrations,
    )


def _grade_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", choices=GRADERS, help="the reward")
    parser.add_argument("input", type=Path, help=_TRANSCRIPTS_HELP)
    parser.add_argument(
        "--out", required=True, type=Path, metavar="FILE", help="one JSON line per transcript"
    )
    parser.add_argument("--bare", action="store_true", help="the response is the answer itself")
    parser.add_argument(
        "--structure-score",
        type=float,
        default=0.0,
        help="of a well formed transcript with a wrong answer (0)",
    )
    parser.add_argument(
        "--final-format-score",
        type=float,
        default=0.0,
        help="of an ill formed transcript with a wrong answer (0)",
    )
    parser.add_argument(
        "--retrieval-score",
        type=float,
        default=0.0,
        help="added where a document shows an accepted answer (0)",
    )
    parser.add_argument(
        "--format-score",
        type=float,
        default=0.0,
        help="of a wrong answer, where the structure does not count (0)",
    )
    parser.add_argument("--judge-url", metavar="URL", help="up to and without /chat/completions")
    parser.add_argument("--judge-model", metavar="NAME", help="the model that judges")
    parser.add_argument("--judge-key-env", metavar="NAME", help="the variable that holds its key")
    parser.add_argument(
        "--verl-version",
        choices=["0.9.0", "0.9.1"],
        default="0.9.0",
        help="whose math_dapo: from 0.9.1 on it also reads a \\boxed{} (0.9.0)",
    )
    parser.set_defaults(run=_grade)


def _grade(options: argparse.Namespace) -> int:
    from graphpo_agent.data_commands import grade
    from graphpo_agent.evals.graders import GradeOptions

    flags = {field.name: vars(options)[field.name] for field in fields(GradeOptions)}
    return grade(options.kind, options.input, options.out, GradeOptions(**flags))


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="option=value", help=_OPTIONS_HELP
    )


def _index_arguments(parser: argparse.ArgumentParser) -> None:
    action = _actions(parser)
    build = action("build", "index a corpus")
    build.add_argument("kind", choices=_INDEX_KINDS, help="how it is searched")
    build.add_argument(
        "--corpus", required=True, metavar="FILE", help='JSON lines: {"id", "contents"}'
    )
    build.add_argument("--out", required=True, metavar="DIR", help=_INDEX_OUT_HELP)
    _add_options(build)
    build.set_defaults(run=_index_build)
    info = action("info", "print what an index is and what it needs")
    info.add_argument("directory", metavar="DIR", help="an index")
    info.set_defaults(run=_index_info)
    merge = action("merge", "one index of the indexes of a corpus' parts")
    merge.add_argument(
        "directories", nargs="+", metavar="DIR", help="the indexes, in the order of the parts"
    )
    merge.add_argument("--out", required=True, metavar="DIR", help=_INDEX_OUT_HELP)
    merge.set_defaults(run=_index_merge)


def _index_build(options: argparse.Namespace) -> int:
    from graphpo_agent.data_commands import build

    return build(options.kind, options.corpus, options.out, options.overrides)


def _index_info(options: argparse.Namespace) -> int:
    from graphpo_agent.data_commands import info

    return info(options.directory)


def _index_merge(options: argparse.Namespace) -> int:
    from graphpo_agent.data_commands import merge

    return merge(options.directories, options.out)


def _serve_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", help="an index")
    _add_options(parser)
    parser.add_argument(
        "--host", default="127.0.0.1", help="0.0.0.0 lets other machines in (127.0.0.1)"
    )
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one (8000)")
    parser.add_argument(
        "--ready-file", type=Path, metavar="FILE", help="receives host:port once it answers"
    )
    parser.add_argument("--pages", type=Path, metavar="FILE", help="page file for /access")
    bound = partial(parser.add_argument, type=int, default=argparse.SUPPRESS)
    bound("--topk", help="documents where none is asked for (3)")
    bound("--max-topk", help="documents of one query (100)")
    bound("--max-queries", help="of one request (4096)")
    bound("--max-query-chars", help="of one query (8192)")
    bound("--max-body-bytes", help="of one request (16 MiB)")
    parser.add_argument("--queue", type=int, default=256, help="requests taken in at once (256)")
    parser.add_argument("--workers", type=int, help="searches at once (one per CPU)")
    parser.add_argument("--deadline", type=float, default=60.0, help="seconds per request (60)")
    parser.set_defaults(run=_serve)


def _serve(options: argparse.Namespace) -> int:
    from graphpo_agent.data_commands import serve_index
    from retrievers.server_messages import Bounds

    inputs = [] if options.pages is None else [options.pages]
    check_apart([] if options.ready_file is None else [options.ready_file], inputs)
    names = {field.name for field in fields(Bounds)}
    bounds = Bounds(**{name: vars(options)[name] for name in names & vars(options).keys()})
    return serve_index(
        options.directory,
        options.overrides,
        host=options.host,
        port=options.port,
        ready_file=options.ready_file,
        pages=options.pages,
        bounds=bounds,
        queue=options.queue,
        workers=options.workers,
        deadline_s=options.deadline,
    )
