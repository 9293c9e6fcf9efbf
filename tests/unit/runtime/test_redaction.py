import pytest

from muster.contracts.job.status import Reason
from muster.contracts.messages.agent import AgentHeartbeat, AgentMessage, RankExited, RankSaid
from muster.contracts.messages.rank import Hello, PermanentFailure, Raised, RankMessage, Warned
from muster.runtime.redaction import Redaction

VALUE = "correct horse battery staple"
KEY = "-----BEGIN KEY-----\nc2VjcmV0IGtleQ==\n-----END KEY-----\n"


def said(message: RankMessage) -> RankSaid:
    return RankSaid(rank=0, attempt=0, message=message)


def exited(*lines: str, error: str | None = None) -> RankExited:
    return RankExited(rank=0, attempt=0, exit_code=1, signal=None, last_lines=lines, error=error)


@pytest.mark.parametrize(
    "message",
    [
        said(Warned(message=f"{VALUE} is no key")),
        said(Raised(step=3, message=f"no key: {VALUE!r}")),
        said(PermanentFailure(reason=Reason.INVALID_PROGRAM, message=VALUE)),
        exited("Traceback:", f"ValueError: {VALUE}"),
        exited(error=f"ValueError: {VALUE}"),
    ],
)
def test_secrets_are_removed_from_messages(message: AgentMessage) -> None:
    redacted = Redaction([VALUE]).redact(message)
    assert VALUE in repr(message)
    assert VALUE not in repr(redacted)
    assert "[secret]" in repr(redacted)


def test_every_line_of_a_secret_is_removed() -> None:
    redacted = Redaction([KEY]).redact(exited("a key:", *KEY.splitlines(), error=KEY))
    assert redacted.last_lines == ("a key:", "[secret]", "[secret]", "[secret]")
    assert "c2VjcmV0" not in (redacted.error or "")


def test_the_longer_of_two_secrets_is_removed_first() -> None:
    redaction = Redaction([VALUE])
    redaction.add([f"{VALUE} and more"])
    assert redaction.redact(exited(f"{VALUE} and more")) == exited("[secret]")


@pytest.mark.parametrize(
    "message",
    [said(Hello()), AgentHeartbeat(stopped=()), said(Warned(message="horse")), exited("x")],
)
def test_messages_without_secrets_are_unchanged(message: AgentMessage) -> None:
    assert Redaction([VALUE]).redact(message) == message


def test_short_secrets_are_not_removed() -> None:
    message = exited("no step was taken")
    assert Redaction(["step"]).redact(message) == message


def test_a_ranks_environment_names_its_secrets() -> None:
    environ = {"MUSTER_SECRETS": "KEY,GONE", "KEY": VALUE, "PATH": "/usr/local/bin"}
    message = exited(f"{VALUE} in /usr/local/bin")
    assert Redaction.of_rank(environ).redact(message) == exited("[secret] in /usr/local/bin")
    assert Redaction.of_rank({"KEY": VALUE}).redact(message) == message
