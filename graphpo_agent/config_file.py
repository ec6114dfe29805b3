"""Configurations as YAML files.

``load_config`` reads a file, applies dotted overrides (``method.merge_threshold=0.9``) and reports
any mistake as one line that names the file, the key and what is allowed.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from graphpo_agent.config import RunConfig, SftConfig
from graphpo_agent.errors import ConfigError
from graphpo_agent.yaml_text import NotYaml, parse_yaml, to_yaml

__all__ = ["dump_config", "load_config", "read_yaml"]

ConfigT = TypeVar("ConfigT", RunConfig, SftConfig)


def load_config(kind: type[ConfigT], path: str | Path, overrides: Sequence[str] = ()) -> ConfigT:
    """Read a YAML configuration and apply dotted overrides.

    Args:
        kind: ``RunConfig`` or ``SftConfig``.
        path: the file.
        overrides: in order, each ``a.b=value``, whose value is YAML (``method.schedule=[6,2]``), or
            another file, whose keys replace those before (``configs/methods/dapo/…``); a mapping
            that says its ``name`` or ``kind`` stands for itself.

    A text that begins with ``~/`` lies in the user's home directory.

    Raises:
        ConfigError: one line naming the file or override, the key, and what is wrong.
    """
    data = read_yaml(Path(path))
    for override in overrides:
        if _is_file(override):
            _merge(data, read_yaml(Path(override)))
        else:
            _apply_override(data, override)
    try:
        data = _from_home(data)
    except RecursionError:
        raise ConfigError(f"{path}: an alias (*name) stands inside what it names") from None
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        problems = [_problem(each, data) for each in error.errors()]
        where, says, unknown = problems[0]
        files = " + ".join([str(path), *filter(_is_file, overrides)])
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        keys = {x: x.partition("=")[0] for x in overrides if not _is_file(x)}
        to_blame = [x for x, key in keys.items() if _reaches(key, where, below=unknown)]
        source = f" (override {to_blame[-1]!r:.200})" if to_blame else ""
        key = f"{where}: " if where else ""
        hint = _hint(problems, overrides)
        raise ConfigError(f"{files}: {key}{says}{more}{source}{hint}") from None


def dump_config(config: BaseModel) -> str:
    """The resolved configuration as YAML that ``load_config`` reads back."""
    return to_yaml(config.model_dump(mode="json"))


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping that a file holds.

    Raises:
        ConfigError: there is no such file, or none that holds a mapping in YAML.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read configuration {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8 text") from None
    try:
        data = parse_yaml(text)
    except NotYaml as error:
        raise ConfigError(f"{path}: not YAML: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: a configuration is a mapping of keys, this is not")
    return data


def _from_home(value: Any) -> Any:
    """The value, the home directory in the place of the ``~`` of every path in it."""
    if isinstance(value, str):
        return os.path.expanduser(value) if value.startswith("~/") else value
    if isinstance(value, dict):
        return {key: _from_home(each) for key, each in value.items()}
    return [_from_home(each) for each in value] if isinstance(value, list) else value


def _is_file(override: str) -> bool:
    """Whether an override names a configuration file instead of a key."""
    return "=" not in override and override.endswith((".yaml", ".yml"))


def _merge(data: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Put the keys of one configuration over those of another."""
    for key, value in more.items():
        known = data.get(key)
        if isinstance(known, dict) and isinstance(value, dict) and not {"name", "kind"} & {*value}:
            _merge(known, value)
        else:
            data[key] = value


def _reaches(key: str, where: str, below: bool) -> bool:
    """Whether an override's key holds a place in the configuration, or lies below it."""
    return f"{where}.".startswith(f"{key}.") or (below and key.startswith(f"{where}."))


def _apply_override(data: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {override!r}: write key.subkey=value")
    *parents, last = key.split(".")
    node = data
    for name in parents:
        child = node[name] = {} if node.get(name) is None else node[name]
        if not isinstance(child, dict):
            raise ConfigError(f"override {override!r}: {name!r} holds a value, not more keys")
        node = child
    try:
        node[last] = parse_yaml(value)
    except NotYaml as error:
        raise ConfigError(f"override {override!r:.200}: the value is not YAML: {error}") from None


class _Problem(NamedTuple):
    """One thing that is wrong.

    Example: ``_Problem("train.stepz", "unknown key", unknown=True)``
    """

    key: str
    """Empty: the whole configuration."""
    says: str
    unknown: bool
    """Whether its section knows no such key."""


def _problem(error: ErrorDetails, data: Any) -> _Problem:
    """What pydantic says of a configuration, by the key that the user wrote."""
    location, context = [*map(str, error["loc"])], error.get("ctx", {})
    keys = [*_keys(location, data)]
    says, given = error["msg"].removeprefix("Value error, "), f" (got {error['input']!r})"
    match error["type"]:
        case "extra_forbidden":
            kind = location[-2:-1]
            says = f"unknown key of {kind[0]!r}" if kind != keys[-2:-1] else "unknown key"
            given = ""
        case "missing":
            says, given = "is missing", ""
        case "union_tag_not_found":
            says, given = f"needs the key {context['discriminator']}", ""
        case "union_tag_invalid":
            keys.append(context["discriminator"].strip("'"))
            given = f" (got {error['input'][keys[-1]]!r})"
            says = f"Input should be {' or '.join(context['expected_tags'].rsplit(', ', 1))}"
        case "model_type" | "model_attributes_type":
            says = "Input should be a mapping of keys"
        case "tuple_type":
            says = "Input should be a list"
    unknown = error["type"] == "extra_forbidden"
    return _Problem(".".join(keys), says + given if keys else says, unknown)


def _hint(problems: Sequence[_Problem], overrides: Sequence[str]) -> str:
    """How to replace a section whose kind alone was overridden, with keys of another kind."""
    sections = {problem.key.rpartition(".")[0] for problem in problems if problem.unknown}
    for override in reversed(overrides):
        key, _, value = override.partition("=")
        section, _, tag = key.rpartition(".")
        if section in sections and tag in ("kind", "name"):
            whole = f"{section}={{{tag}: {value}}}"
            return f"; {key} keeps the other keys: {whole} replaces the whole section"
    return ""


def _keys(location: Sequence[str], data: Any) -> Iterator[str]:
    """A problem's location as the user wrote it: pydantic adds the tag of a union's choice."""
    for number, part in enumerate(location, 1):
        if isinstance(data, dict):
            absent = part not in data and number < len(location)  # the tag of a default
            if absent or part in (data.get("kind"), data.get("name")):
                continue
            data = data.get(part)
        yield part
