"""Words that are repeated hold no secret, and are otherwise the same."""

import pytest

from muster.contracts.job import Reason
from muster.contracts.messages import (
    AgentMessage,
    Hello,
    Pulse,
    Raised,
    RankExited,
    RankMessage,
    RankSaid,
    Refused,
    Warned,
)
from muster.redaction import Redaction

VALUE = "correct horse battery staple"
KEY = "-----BEGIN KEY-----\nc2VjcmV0IGtleQ==\n-----END KEY-----\n"


def said(message: RankMessage) -> RankSaid:
    return RankSaid(rank=0, incarnation=0, message=message)


def exited(*lines: str, error: str | None = None) -> RankExited:
    return RankExited(
        rank=0, incarnation=0, exit_code=1, signal=None, last_lines=lines, error=error
    )


@pytest.mark.parametrize(
    "told",
    [
        said(Warned(message=f"{VALUE} is no key")),
        said(Raised(step=3, message=f"no key: {VALUE!r}")),
        said(Refused(reason=Reason.INVALID_PROGRAM, message=VALUE)),
        exited("Traceback:", f"ValueError: {VALUE}"),
        exited(error=f"ValueError: {VALUE}"),
    ],
)
def test_a_secret_is_not_repeated(told: AgentMessage) -> None:
    redacted = Redaction([VALUE]).of(told)
    assert VALUE in repr(told)
    assert VALUE not in repr(redacted)
    assert "[secret]" in repr(redacted)


def test_the_lines_of_a_key_are_not_repeated_either() -> None:
    redacted = Redaction([KEY]).of(exited("a key:", *KEY.splitlines(), error=KEY))
    assert redacted.last_lines == ("a key:", "[secret]", "[secret]", "[secret]")
    assert "c2VjcmV0" not in (redacted.error or "")


def test_of_two_secrets_the_longer_one_leaves_nothing_of_itself() -> None:
    redaction = Redaction([VALUE])
    redaction.learn([f"{VALUE} and more"])
    assert redaction.of(exited(f"{VALUE} and more")) == exited("[secret]")


@pytest.mark.parametrize(
    "told", [said(Hello()), Pulse(stopped=()), said(Warned(message="correct horse")), exited("x")]
)
def test_all_else_is_told_as_it_was_said(told: AgentMessage) -> None:
    assert Redaction([VALUE]).of(told) == told


def test_a_short_secret_is_left_in_innocent_words() -> None:
    told = exited("no step was taken")
    assert Redaction(["step"]).of(told) == told


def test_a_rank_knows_which_of_its_variables_are_secrets() -> None:
    environ = {"MUSTER_SECRETS": "KEY,GONE", "KEY": VALUE, "PATH": "/usr/local/bin"}
    told = exited(f"{VALUE} in /usr/local/bin")
    assert Redaction.of_rank(environ).of(told) == exited("[secret] in /usr/local/bin")
    assert Redaction.of_rank({"KEY": VALUE}).of(told) == told
