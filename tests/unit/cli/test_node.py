"""What commands ask of a node."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

from cli.node import ask
from muster.mesh.group import Mesh


class _LateLink:
    """A network whose only node is linked when it is looked for the second time."""

    def __init__(self) -> None:
        self.readers: dict[str, Callable[[str, bytes], None]] = {}
        node = SimpleNamespace(node_id="n-1", process_id="p-1"), SimpleNamespace(machine="m")
        self._looks = iter([[], [node]])

    def hellos(self) -> list[tuple[SimpleNamespace, SimpleNamespace]]:
        return next(self._looks)

    def send_note(self, process: str, topic: str, payload: bytes) -> None:
        self.readers[topic](process, payload + b"!")


def test_a_question_waits_until_the_node_is_linked() -> None:
    own = cast("Mesh", SimpleNamespace(network=_LateLink()))
    assert ask(own, "n-1", "topic", b"who", 60) == b"who!"
