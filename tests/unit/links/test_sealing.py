"""What a network between two hosts may do to the payloads of a link."""

import subprocess
import sys
from collections.abc import Callable

import pytest

from muster.contracts.errors import AuthenticationFailed
from muster.links.sealing import Cipher, derive_keys

SAID = (b"the agent's nonce", b"the coordinator's nonce")
TOKEN = b"token"


def ends(token: bytes = TOKEN, said: tuple[bytes, bytes] = SAID) -> tuple[Cipher, Cipher]:
    """Return the ciphers of an agent and of the coordinator it was started by."""
    return (
        Cipher(derive_keys(TOKEN, b"".join(SAID), is_caller=True)),
        Cipher(derive_keys(token, b"".join(said), is_caller=False)),
    )


def test_messages_open_in_order_in_both_directions() -> None:
    agent, coordinator = ends()
    messages = [b"", b"one", b"two" * 1000]
    for sender, receiver in (agent, coordinator), (coordinator, agent):
        assert [receiver.open(it) for it in [sender.seal(it) for it in messages]] == messages


def test_nothing_readable_is_on_the_wire() -> None:
    assert b"token" not in ends()[0].seal(b"the token")


@pytest.mark.parametrize(
    "deliver",
    [
        lambda one, _: one[:-1],
        lambda _, two: two,
        lambda one, _: one[:3] + bytes([one[3] ^ 1]) + one[4:],
        lambda one, _: one[:-1] + bytes([one[-1] ^ 1]),
        lambda one, two: one + two,
        lambda one, _: bytes(len(one)),
        lambda _one, _two: b"",
    ],
    ids=["cut short", "out of order", "changed", "tag", "joined", "zeros", "empty"],
)
def test_another_message_does_not_open(deliver: Callable[[bytes, bytes], bytes]) -> None:
    agent, coordinator = ends()
    with pytest.raises(AuthenticationFailed, match="check what is between the hosts"):
        coordinator.open(deliver(agent.seal(b"first"), agent.seal(b"second")))


def test_a_repeated_message_does_not_open() -> None:
    agent, coordinator = ends()
    sealed = agent.seal(b"once")
    assert coordinator.open(sealed) == b"once"
    for receiver in coordinator, agent:  # sent again, and sent back
        with pytest.raises(AuthenticationFailed):
            receiver.open(sealed)


@pytest.mark.parametrize(
    ("token", "said"),
    [
        (b"another", SAID),
        (TOKEN, (SAID[0], b"another nonce")),
        (TOKEN, (b"another nonce", SAID[1])),
    ],
    ids=["token", "coordinator's nonce", "agent's nonce"],
)
def test_other_keys_open_nothing(token: bytes, said: tuple[bytes, bytes]) -> None:
    agent, coordinator = ends(token, said)
    with pytest.raises(AuthenticationFailed):
        coordinator.open(agent.seal(b"data"))


def test_a_header_is_authenticated() -> None:
    agent, coordinator = ends()
    sealed = agent.seal(b"data", b"header")
    with pytest.raises(AuthenticationFailed):
        coordinator.open(sealed, b"Header")
    assert coordinator.open(sealed, b"header") == b"data"


@pytest.mark.slow
def test_services_of_one_host_do_not_load_ciphers() -> None:
    code = "import sys, worker.agent, coordinator.service; sys.exit('cryptography' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
