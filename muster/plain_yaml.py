"""YAML in which a number is what people take for one, on whichever side it is read.

YAML 1.1 knows numbers of base 60: to it `12:30` is 750. Nobody means that, so here it is text. The
work of reading a number grows with the square of its length, so of a long one nothing is made.
"""

import re
from typing import Any, Final

import yaml

NUMBER_LIMIT: Final = 100
"""Characters; far more than any number needs that a job can have."""

_INT_TAG: Final = "tag:yaml.org,2002:int"
_FLOAT_TAG: Final = "tag:yaml.org,2002:float"

_WRITTEN: Final = {
    _INT_TAG: re.compile(r"[-+]?(?:0b[01_]+|0x[0-9a-fA-F_]+|0[0-7_]*|[1-9][0-9_]*)$"),
    _FLOAT_TAG: re.compile(
        r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+][0-9]+)?|\.(?:inf|Inf|INF))$"
        r"|\.[0-9][0-9_]*(?:[eE][-+][0-9]+)?$|\.(?:nan|NaN|NAN)$"
    ),
}
"""As PyYAML has them, without base 60."""


def plain(loader: Any) -> Any:  # noqa: ANN401  PyYAML has no types
    """Return this loader of PyYAML, but with plain numbers."""
    known = loader.yaml_implicit_resolvers
    resolvers = {
        first: [(tag, _WRITTEN.get(tag, written)) for tag, written in words]
        for first, words in known.items()
    }
    made: Any = type(f"Plain{loader.__name__}", (loader,), {"yaml_implicit_resolvers": resolvers})
    made.add_constructor(_INT_TAG, _integer)
    made.add_constructor(_FLOAT_TAG, _float)
    return made


def _integer(loader: Any, node: yaml.Node) -> Any:  # noqa: ANN401  as above
    _refuse_long(node)
    return loader.construct_yaml_int(node)


def _float(loader: Any, node: yaml.Node) -> Any:  # noqa: ANN401  as above
    _refuse_long(node)
    return loader.construct_yaml_float(node)


def _refuse_long(node: yaml.Node) -> None:
    if len(node.value) > NUMBER_LIMIT:
        raise yaml.MarkedYAMLError(
            problem=f"a number has more than {NUMBER_LIMIT} characters, put text in quotes",
            problem_mark=node.start_mark,
        )
