"""What the verbs about data and documents do. Nothing here needs a model."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from graphpo_agent.data.prepare import Summary
from graphpo_agent.data.prepare import prepare as prepare_data
from graphpo_agent.data.sources import SOURCES
from graphpo_agent.data.tasks import write_demonstrations, write_tasks
from graphpo_agent.data.verl_parquet import Trainer, write_verl_parquet
from graphpo_agent.errors import ConfigError, DataError
from graphpo_agent.evals.grade import grade_file
from graphpo_agent.evals.graders import GradeOptions
from graphpo_agent.outputs import check_apart, check_place
from graphpo_agent.yaml_text import NotYaml, parse_yaml
from retrievers.index import build_index, describe_index, merge_indexes, open_index
from retrievers.server import serve

__all__ = ["build", "grade", "info", "merge", "prepare", "serve_index"]

_OPENS = ("'", '"', "[", "{")
"""What a YAML value begins with that is more than a bare text."""


def prepare(
    source: str,
    files: Sequence[Path],
    *,
    out: Path,
    exclude: Sequence[Path],
    keep_unanswerable: bool,
    parquet: Path | None,
    parquet_for: Trainer | None,
    demonstrations: Path | None,
) -> int:
    """``graphpo data prepare``; nothing is written before every row was checked."""
    if parquet_for is not None and parquet is None:
        raise ConfigError("--parquet-for needs --parquet FILE")
    trainer = parquet_for or "verl"
    outputs = [path for path in (out, parquet, demonstrations) if path is not None]
    for path in outputs:
        check_place(path)
    check_apart(outputs, [*files, *exclude])
    if parquet is not None and not SOURCES[source].for_agents:
        raise ConfigError(f"--parquet writes tasks of search agents, not those of {source}")
    prepared = prepare_data(
        source, files, exclude=exclude, keep_unanswerable=keep_unanswerable, progress=True
    )
    if demonstrations is not None and not prepared.demonstrations:
        raise DataError(f"{', '.join(map(str, files))}: no row holds a recorded trajectory")
    write_tasks(out, prepared.tasks)
    if parquet is not None:
        own = prepared.tool_prompts if trainer == "verl" else prepared.prompts
        write_verl_parquet(parquet, prepared.tasks, trainer, own)
    if demonstrations is not None:
        write_demonstrations(demonstrations, prepared.demonstrations)
    print(_described(prepared.summary))
    for path in outputs:
        print(path)
    return 0


def _described(summary: Summary) -> str:
    lines = [f"{summary.rows:,} rows → {summary.tasks:,} tasks"]
    if summary.repeated:
        lines.append(f"  {summary.repeated:,} ask a question again; their answers were added")
    lines += [f"  {count:,} left out: {reason}" for reason, count in summary.dropped.items()]
    lines += [f"  {count:,} left out: asked in {file}" for file, count in summary.overlaps.items()]
    if summary.demonstrations:
        lines.append(f"  {summary.demonstrations:,} recorded trajectories")
    return "\n".join(lines)


def grade(kind: str, path: Path, out: Path, options: GradeOptions) -> int:
    """``graphpo grade``."""
    summary = grade_file(kind, str(path), str(out), options)
    mean = "unknown" if math.isnan(summary.mean) else f"{summary.mean:.3f}"
    print(f"mean score {mean} over {summary.scored:,} transcripts")
    for status, count in summary.statuses.items():
        print(f"  {count:,} {status}")
    print(out)
    return 0


def build(kind: str, corpus: str, out: str, options: Sequence[str]) -> int:
    """``graphpo index build``."""
    manifest = build_index(kind, corpus, out, **_options(options))
    print(f"{kind} index of {manifest['num_docs']:,} documents: {out}")
    return 0


def info(directory: str) -> int:
    """``graphpo index info``: the manifest of an index, and what it takes."""
    print(json.dumps(describe_index(directory), indent=2))
    return 0


def merge(directories: Sequence[str], out: str) -> int:
    """``graphpo index merge``."""
    manifest = merge_indexes(directories, out)
    print(f"{manifest['kind']} index of {manifest['num_docs']:,} documents: {out}")
    return 0


def serve_index(directory: str, options: Sequence[str], **settings: Any) -> int:
    """``graphpo serve``."""
    chosen = _options(options)
    return serve(lambda: open_index(directory, **chosen), serves={"index": directory}, **settings)


def _options(texts: Sequence[str]) -> dict[str, Any]:
    """``name=value`` texts as a mapping.

    Values are as in YAML, but for bare texts: they are what stands there, ``"query: "`` for one.
    """
    options: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise ConfigError(f"option {text!r}: write name=value")
        try:
            parsed = parse_yaml(value)
        except NotYaml:
            raise ConfigError(f"option {text!r:.200}: the value is not YAML") from None
        bare = isinstance(parsed, str | dict) and not value.lstrip().startswith(_OPENS)
        options[name] = value if bare else parsed
    return options
