"""References to secrets, and the variables that a service shares."""

import pytest

from muster.contracts.errors import InvalidEnvironment, InvalidSpec
from muster.contracts.job.problems import checked
from muster.contracts.job.secrets import SHARED_VARIABLES, Reference, plaintext_secrets
from muster.contracts.job.spec import JobSpec
from muster.contracts.settings.services import shared_variables


@pytest.mark.parametrize("text", ["env:HF_TOKEN", "file:hf-token", "file:a.b_c", "file:_"])
def test_secret_reference_round_trips(text: str) -> None:
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
def test_invalid_reference_is_refused_and_not_shown(text: str) -> None:
    assert Reference.parse(text) is None
    with pytest.raises(InvalidSpec) as refused:
        checked(JobSpec(secrets={"TOKEN": text}))
    assert "secrets: the value of 'TOKEN' is not a reference: write file:NAME" in str(refused.value)
    assert not text or repr(text) not in str(refused.value)


def test_variable_in_env_and_secrets_is_refused() -> None:
    with pytest.raises(InvalidSpec, match="'TOKEN' is in env as well"):
        checked(JobSpec(env={"TOKEN": "x"}, secrets={"TOKEN": "file:token"}))


def test_shared_variables_are_read() -> None:
    assert shared_variables({}) == frozenset()
    assert shared_variables({SHARED_VARIABLES: "HF_TOKEN, WANDB_API_KEY,"}) == {
        "HF_TOKEN",
        "WANDB_API_KEY",
    }


@pytest.mark.parametrize("own", ["MUSTER_TOKEN", "MUSTER_DATABASE_URL"])
def test_services_own_variables_are_not_shared(own: str) -> None:
    with pytest.raises(InvalidEnvironment, match=f"a list without {own}"):
        shared_variables({SHARED_VARIABLES: f"HF_TOKEN,{own}"})


def test_invalid_shared_name_is_refused() -> None:
    with pytest.raises(InvalidEnvironment, match="comma-separated"):
        shared_variables({SHARED_VARIABLES: "HF_TOKEN WANDB_API_KEY"})


def test_plaintext_secrets_are_found_by_name_or_in_a_url() -> None:
    names = "HF_TOKEN PASSWORD PGPASSWORD AWS_SECRET_ACCESS_KEY WANDB_API_KEY apikey OPENAI_KEY"
    env = dict.fromkeys([*names.split(), "GITHUB_PAT", "SSH_PASSPHRASE"], "x")
    env |= {"DATABASE_URL": "postgres://u:hunter2@h/x"}
    innocent = dict.fromkeys(["TOKENIZERS_PARALLELISM", "KEYS", "MAX_TOKENS", "MONKEY"], "x")
    innocent |= {"URL": "http://u@h/x", "AT": "see http://h:1/x"}
    assert plaintext_secrets({**env, **innocent, "EMPTY_TOKEN": ""}) == list(env)
