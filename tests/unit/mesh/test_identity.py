"""What two processes of a household prove to each other, and what a stranger cannot."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from muster.contracts.errors import AuthenticationFailed
from muster.links.frames import frame
from muster.links.session import Answerer, Caller
from muster.mesh.identity import Claim, MeshIdentity, claim_of, mesh_identity

KEY = b"k" * 32


def identity(directory: Path, name: str = "home", key: bytes = KEY) -> MeshIdentity:
    return mesh_identity(name, directory / "node.key", key)


def meet(caller: MeshIdentity, answerer: MeshIdentity) -> tuple[Caller, Answerer]:
    """Return both ends of a link that is open."""
    call, answer = Caller(caller), Answerer(lambda _: answerer)
    answer.receive(call.take())
    call.receive(answer.take())
    answer.receive(call.take())
    return call, answer


def test_both_ends_know_the_process_and_its_node(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    own, other = identity(tmp_path), identity(tmp_path / "other")
    call, answer = meet(own, other)
    assert claim_of(call.claim) == other.own
    assert claim_of(answer.claim) == own.own
    again = identity(tmp_path)
    assert again.own.node_id == own.own.node_id != other.own.node_id
    assert again.own.process_id != own.own.process_id
    call.send(b"a payload")
    sent = call.take()
    assert b"a payload" not in sent
    assert answer.receive(sent) == [b"a payload"]


def test_another_household_or_secret_is_refused(tmp_path: Path) -> None:
    own = identity(tmp_path)
    with pytest.raises(AuthenticationFailed, match=r"the cluster 'lab'.*MUSTER_CLUSTER_NAME"):
        meet(own, identity(tmp_path, "lab"))
    with pytest.raises(AuthenticationFailed, match="another secret"):
        meet(own, identity(tmp_path, key=b"x" * 32))
    with pytest.raises(AuthenticationFailed, match="called itself"):
        meet(own, own)


def forged(own: MeshIdentity, claim: Claim) -> MeshIdentity:
    """Return an identity with the secret, and a claim that is not its own."""
    said = msgspec.msgpack.encode(claim)
    return replace(own, claim=said, answer=said, own=claim)


@pytest.mark.parametrize("field", ["key", "node_key", "signature"])
@pytest.mark.parametrize("is_caller", [True, False])
def test_the_keys_of_others_cannot_be_claimed(
    tmp_path: Path, field: str, *, is_caller: bool
) -> None:
    (tmp_path / "other").mkdir()
    own, victim = identity(tmp_path), identity(tmp_path / "other")
    taken = {field: getattr(victim.own, field)}
    liar = forged(identity(tmp_path), msgspec.structs.replace(own.own, **taken))
    with pytest.raises(AuthenticationFailed, match=r"not have the key that it names|called itself"):
        meet(*((liar, victim) if is_caller else (victim, liar)))


@pytest.mark.parametrize("said", [b"", b"\xff" * 40, msgspec.msgpack.encode(["home"]), b"x" * 300])
def test_what_is_no_claim_is_refused(tmp_path: Path, said: bytes) -> None:
    own = identity(tmp_path)
    liar = replace(own, claim=said, answer=said)
    for caller, answerer in ((liar, own), (own, liar)):
        with pytest.raises(AuthenticationFailed):
            meet(caller, answerer)


def test_an_answer_that_is_cut_short_is_refused(tmp_path: Path) -> None:
    for size in range(0, 120, 7):
        call = Caller(identity(tmp_path))
        with pytest.raises(AuthenticationFailed):
            call.receive(frame((b"muster\0\x01" + bytes(200))[:size]))
