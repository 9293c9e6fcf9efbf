"""What a person at a terminal or in a script does next, where the API refuses and speaks of itself.

A problem document names the next request, for whoever speaks HTTP. Here the same is said in the
words of ``muster``; a kind that is not in the table says what its document says.
"""

import re
from collections.abc import Mapping
from typing import Final
from urllib.parse import unquote

from muster.contracts.token import WAY_TO_ADMIN

_NAMED: Final = re.compile(r"/(?:jobs|tokens)/([^/]+)")
"""In a path, what stands before it being the alias ``/api/v1``, or a proxy's own."""

_WAYS: Final[Mapping[str, str]] = {
    "job-not-found": "there is no job {name}: muster ps lists them",
    "job-exists": "a job has this id already: choose another, or delete that one first with "
    "muster rm (and --force: its checkpoints, too)",
    "job-not-over": "{name} is not over: stop it first (muster stop {name}), or delete it with "
    "--stop (it saves a last checkpoint) or --force (at once)",
    "never-pauses": "{name} is independent: its ranks share no step before which to pause. Stop it "
    "(muster stop {name}) and go on later: --set resume_from={name}",
    "worker-not-found": "{name} has no such worker: muster workers {name} lists them",
    "no-token": "this service needs a token from you: export MUSTER_TOKEN=mst_… (whoever runs the "
    "service makes one with muster token create)",
    "token-required": "this service needs a token from everybody: export MUSTER_TOKEN=mst_…. If it "
    f"is yours and nobody has one of scope admin, {WAY_TO_ADMIN}",
    "token-not-found": "there is no token {name}, or it was revoked before: muster token ls lists "
    "them",
}
"""By the kind of problem."""


def way_on(kind: str, instance: str) -> str | None:
    """Return the sentence for a problem of this `kind`; None if its own will do.

    `instance` is the path that was asked for, such as ``/jobs/my-job/stop``; none was where it was
    the client who found out.
    """
    sentence = _WAYS.get(kind.removeprefix("/problems/")) if instance else None
    named = _NAMED.search(instance)
    return sentence and sentence.format(name=unquote(named[1]) if named else "")
