"""YAML text to plain values and back; PyYAML's account of a mistake becomes an error with one line.

``1e-3`` is a number, as in YAML 1.2; to PyYAML by itself it is a text.
"""

import re
from typing import Any

import yaml
from yaml.nodes import MappingNode, ScalarNode

__all__ = ["NotYaml", "parse_yaml", "to_yaml"]

_FLOAT = "tag:yaml.org,2002:float"
_POWER = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$")


class NotYaml(ValueError):
    """A text that is not YAML, and why, in one line."""


class _Loader(yaml.SafeLoader):
    """``SafeLoader`` that refuses a key twice in one mapping; the last would silently win."""

    def compose_mapping_node(self, anchor: Any) -> MappingNode:
        node = super().compose_mapping_node(anchor)
        assert node is not None
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if isinstance(key, ScalarNode):
                if (key.tag, key.value) in seen:
                    raise yaml.MarkedYAMLError(
                        problem=f"the key {key.value!r} occurs twice", problem_mark=key.start_mark
                    )
                seen.add((key.tag, key.value))
        return node


class _Dumper(yaml.SafeDumper):
    """``SafeDumper`` that quotes the texts that ``_Loader`` would take for numbers."""


_Loader.add_implicit_resolver(_FLOAT, _POWER, list("-+.0123456789"))
_Dumper.add_implicit_resolver(_FLOAT, _POWER, list("-+.0123456789"))


def parse_yaml(text: str) -> Any:
    """The plain value that a text says.

    Raises:
        NotYaml: it is not YAML, has a key twice in one mapping, or a value that its own kind cannot
            have, such as the date ``2026-13-01``.
    """
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise NotYaml(reason.replace(' in "<unicode string>"', "")) from None
    except RecursionError:
        raise NotYaml("nested too deeply") from None
    except (AttributeError, KeyError):  # of PyYAML, where an explicit tag does not fit
        raise NotYaml("a value does not fit its tag") from None


def to_yaml(value: Any, *, braces: bool = False) -> str:
    """The text of a plain value that ``parse_yaml`` reads back, in lines or within ``braces``."""
    return yaml.dump(
        value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=braces
    )
