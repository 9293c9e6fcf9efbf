"""References, and nothing that only looks like one."""

import pytest

from muster.contracts.environ import names_lent
from muster.contracts.errors import InvalidEnvironment, InvalidSpec
from muster.contracts.secrets import LENT, Reference, secrets_in_the_clear
from muster.contracts.spec import JobSpec
from muster.contracts.spec_problems import checked


@pytest.mark.parametrize("text", ["env:HF_TOKEN", "file:hf-token", "file:a.b_c", "file:_"])
def test_a_reference_is_read_as_it_is_written(text: str) -> None:
    reference = Reference.parse(text)
    assert reference is not None
    assert str(reference) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hf-token",
        "file:",
        "file:.",
        "file:..",
        "file:../muster.db",
        "file:/etc/passwd",
        "file:a/b",
        "file:a\n",
        "file:a\0",
        "FILE:a",
        "http:a",
        "env:A=B",
        "env:" + "A" * 129,
        "file:ä",
    ],
)
def test_what_is_no_reference_is_refused_and_not_repeated(text: str) -> None:
    assert Reference.parse(text) is None
    with pytest.raises(InvalidSpec) as refused:
        checked(JobSpec(secrets={"TOKEN": text}))
    assert "secrets: what 'TOKEN' is given is no reference: write file:NAME" in str(refused.value)
    assert not text or repr(text) not in str(refused.value)


def test_a_variable_is_set_in_one_way_only() -> None:
    with pytest.raises(InvalidSpec, match="'TOKEN' is in env as well"):
        checked(JobSpec(env={"TOKEN": "x"}, secrets={"TOKEN": "file:token"}))


def test_a_secret_is_a_variable_and_has_the_name_of_one() -> None:
    with pytest.raises(InvalidSpec, match="'MY TOKEN' is not the name of an environment variable"):
        checked(JobSpec(secrets={"MY TOKEN": "file:token"}))


def test_a_service_lends_what_it_names() -> None:
    assert names_lent({}) == frozenset()
    assert names_lent({LENT: "HF_TOKEN, WANDB_API_KEY,"}) == {"HF_TOKEN", "WANDB_API_KEY"}


@pytest.mark.parametrize("own", ["MUSTER_TOKEN", "MUSTER_DATABASE_URL"])
def test_a_service_lends_nobody_its_own_keys(own: str) -> None:
    with pytest.raises(InvalidEnvironment, match=f"a list without {own}, which is no job's"):
        names_lent({LENT: f"HF_TOKEN,{own}"})


def test_what_is_no_name_cannot_be_lent() -> None:
    with pytest.raises(InvalidEnvironment, match="separated by commas"):
        names_lent({LENT: "HF_TOKEN WANDB_API_KEY"})


def test_names_tell_what_is_a_secret_in_the_clear() -> None:
    env = dict.fromkeys(
        ["HF_TOKEN", "PASSWORD", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", "apikey"], "x"
    )
    innocent = dict.fromkeys(["TOKENIZERS_PARALLELISM", "KEYS", "MAX_TOKENS", "MONKEY"], "x")
    assert secrets_in_the_clear({**env, **innocent, "EMPTY_TOKEN": ""}) == list(env)
