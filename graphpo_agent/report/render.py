"""The page's templates, with everything that is filled in escaped."""

from jinja2 import Environment, PackageLoader, StrictUndefined

from graphpo_agent.report import numbers

__all__ = ["render"]

_ENVIRONMENT = Environment(
    loader=PackageLoader("graphpo_agent.report", "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_ENVIRONMENT.filters["compact"] = numbers.compact


def render(template: str, **values: object) -> str:
    """Fill in a template of this package; strings are escaped unless they are ``Markup``."""
    return _ENVIRONMENT.get_template(template).render(values)
