"""What is a number in YAML, and what is text."""

from typing import Any

import pytest
import yaml

from muster.plain_yaml import NUMBER_LIMIT, plain

LOADERS = [plain(getattr(yaml, name)) for name in ("SafeLoader", "CSafeLoader")]


@pytest.fixture(params=LOADERS)
def loader(request: pytest.FixtureRequest) -> Any:  # noqa: ANN401  PyYAML has no types
    return request.param


@pytest.mark.parametrize(
    "word", ["12:30", "-1:1", "1:1:1", "1:30.5", "190:20:30.15", "1:" * 99 + "1"]
)
def test_what_has_colons_is_text(loader: Any, word: str) -> None:  # noqa: ANN401
    assert yaml.load(word, loader) == word  # noqa: S506


WORDS = (
    "0 -0 +7 12 1_000 0b101 -0b1_0 0x1F 0o7 010 08 0_ 1. .5 -.5 1.5 1e5 1.5e5 1.5e+5 1.5E-5 "
    "1_0.5 .inf -.INF +.Inf .nan .NaN inf nan 1_ _1 + - . .. 1.2.3 2026-03-01 yes off ~ null "
    "1e+5 .e+5 -.nan"
)


@pytest.mark.parametrize("word", WORDS.split())
def test_everything_else_is_what_it_is_to_yaml(loader: Any, word: str) -> None:  # noqa: ANN401
    assert repr(_read(word, loader)) == repr(_read(word, yaml.SafeLoader))


def _read(word: str, loader: Any) -> object:  # noqa: ANN401
    try:
        return yaml.load(word, loader)  # noqa: S506
    except Exception as error:  # noqa: BLE001
        return type(error)


@pytest.mark.parametrize("before", ["", "!!int ", "!!float "])
def test_a_number_without_end_is_refused_with_its_place(loader: Any, before: str) -> None:  # noqa: ANN401
    digits = "7" * NUMBER_LIMIT
    assert yaml.load(f"{before}{digits}", loader) in {int(digits), float(digits)}  # noqa: S506
    with pytest.raises(yaml.MarkedYAMLError, match="more than 100 characters") as refused:
        yaml.load(f"a: {before}{digits}7", loader)  # noqa: S506
    assert refused.value.problem_mark is not None


def test_loaders_of_others_are_as_they_were() -> None:
    assert yaml.safe_load("12:30") == 750
