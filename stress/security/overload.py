"""A service under attack: limits apply to each client, and honest clients are served.

``python -m stress.security.overload`` runs hundreds of slow clients that hold a connection while
others flood the service and send too much. It prints how long an honest client waited and the
responses of the others, and exits with 1 if a limit did not hold. As root it sends as different
users.
"""

import math
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from http import HTTPStatus
from pathlib import Path

import msgspec
from msgspec import structs

from api.access.rate_limits import BURST_SECONDS
from database.engine import Database
from database.tokens import Tokens
from muster.contracts.settings import AccessSettings
from muster.contracts.token import Scope
from stress.load.client import Connection, port_of
from stress.load.figures import Figure, at_least, at_most, none_of, p99_ms, percentile, report_of
from stress.runner import Report, main
from stress.security.overload_clients import SLOW_EACH, Outcome, Plan, crowd_name
from tests.support.installation import Installation
from tests.support.usage import memory_bytes

WAIT_GOAL_MS = 200.0
MEMORY_GOAL_MIB = 64.0
MIB = 1 << 20

CLOSED = 0
"""The connection may be closed before the client has read the response."""

REFUSALS = {
    "flood": {429},
    "streams": {429, CLOSED},
    "long headers": {431, CLOSED},
    "header lines": {431, CLOSED},
    "large bodies": {413, CLOSED},
    "many names": {414, 422},
}

PASSES = {
    "flood": 200,
    "streams": 200,
    "long headers": 200,
    "header lines": 200,
    "large bodies": 201,
    "many names": 200,
}
"""The status of an accepted request."""

CROWD_GOAL = 3.0
"""How many times as long as without a crowd a look of the owner may take, p95."""

PAUSE_SECONDS = 0.02
"""Pause of the honest client after each response."""


def overload_figures(
    root: Path, *, seconds: float, slow: int, **environment: str
) -> Iterator[Figure]:
    """Attack a new service with the limits of `environment`."""
    installation = Installation(root, **environment)
    door = AccessSettings.read(installation.environment)
    installation.start_api()
    try:
        plan = _plan(installation, seconds, slow)
        before = memory_bytes(installation.api.pid, "VmRSS")
        honest = _Honest(plan)
        outcome = _attack(root, plan, honest)
        peak = memory_bytes(installation.api.pid, "VmHWM")
    finally:
        installation.close()
    wait = p99_ms(honest.waits)
    yield at_most(f"an honest client waits, p99 of {len(honest.waits)}", wait, WAIT_GOAL_MS, " ms")
    yield none_of("  and is refused", honest.faults)
    yield from _demands(outcome, door)
    yield at_most("memory grows by", (peak - before) / MIB, MEMORY_GOAL_MIB, " MiB")


def crowd_figures(root: Path, *, seconds: float, crowd: int) -> Iterator[Figure]:
    """Hold as many connections of another user as it may, and compare with none."""
    installation = Installation(root)
    installation.start_api()
    try:
        plan = structs.replace(_plan(installation, seconds, 0), crowd=crowd)
        calm, owner = _Owner(plan), _Owner(plan)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            calm.ask()
        _attack(root, plan, owner)
    finally:
        installation.close()
    calm_ms, crowded_ms = (1000 * percentile(it.waits, 95) for it in (calm, owner))
    what = f"{crowd} connections of another user: GET /jobs, p95 of {len(owner.waits)}"
    yield at_most(what, crowded_ms, CROWD_GOAL * calm_ms, f" ms (calm {calm_ms:.3g} ms)")
    yield none_of("  and is refused", owner.faults)


def _plan(installation: Installation, seconds: float, slow: int) -> Plan:
    database = Database.open(f"sqlite:///{installation.files.root}/muster.db")
    tokens = Tokens(database)
    shown = {
        name: tokens.create(name.replace(" ", "-"), Scope.SUBMIT, lifetime=None, created_by=None)[1]
        for name in (*REFUSALS, *map(crowd_name, range(1 + slow // SLOW_EACH)))
    }
    database.close()
    job_id = installation.submit(world_size=1, command=["true"])
    return Plan(
        port=port_of(installation.url),
        seconds=seconds,
        slow=slow,
        tokens=shown,
        job_id=job_id,
    )


def _attack(root: Path, plan: Plan, honest: "_Honest | _Owner") -> Outcome:
    said = root / "outcome.json"
    with said.open("wb") as outcome:
        words = [
            sys.executable,
            "-m",
            "stress.security.overload_clients",
            msgspec.json.encode(plan).decode(),
        ]
        attackers = subprocess.Popen(words, cwd=Path(__file__).parents[2], stdout=outcome)
    try:
        while attackers.poll() is None:
            honest.ask()
    finally:
        attackers.kill()
        attackers.wait()
    assert attackers.returncode == 0, "the attackers failed"
    return msgspec.json.decode(said.read_bytes(), type=Outcome)


class _Owner:
    """Lists the jobs; uses a new connection for each look."""

    def __init__(self, plan: Plan) -> None:
        self._port = plan.port
        self.waits: list[float] = []
        self.faults: list[str] = []

    def ask(self) -> None:
        began = time.perf_counter()
        with Connection(self._port) as connection:
            answer = connection.get("/jobs")
        self.waits.append(time.perf_counter() - began)
        if answer.status != HTTPStatus.OK:
            self.faults.append(f"{answer.status} {answer.body.decode()}")
        time.sleep(PAUSE_SECONDS)


class _Honest:
    """Reads a job and the list, and submits; uses a new connection for each round."""

    def __init__(self, plan: Plan) -> None:
        self._port = plan.port
        self._looks = (f"/jobs/{plan.job_id}", "/jobs?limit=50", "/jobs/summaries?limit=50")
        self.waits: list[float] = []
        self.faults: list[str] = []

    def ask(self) -> None:
        body = {"command": ["true"], "world_size": 1}
        began = time.perf_counter()
        with Connection(self._port) as connection:
            connecting = time.perf_counter() - began
            key = f"honest-{len(self.waits)}"
            for asked in (
                *(partial(connection.get, path) for path in self._looks),
                partial(connection.post, "/jobs", body, idempotency_key=key),
            ):
                answer = asked()
                self.waits.append(connecting + answer.seconds)
                if answer.status not in {200, 201}:
                    self.faults.append(f"{answer.status} {answer.body.decode()}")
                time.sleep(PAUSE_SECONDS)
                connecting = 0.0


def _demands(outcome: Outcome, door: AccessSettings) -> Iterator[Figure]:
    let_in = {kind: statuses.get(PASSES[kind], 0) for kind, statuses in outcome.statuses.items()}
    most = {
        "flood": math.floor(door.requests_per_second * (BURST_SECONDS + outcome.flood_seconds)),
        "streams": door.requests_at_once,
    }
    for kind, statuses in sorted(outcome.statuses.items()):
        asked = sum(statuses.values())
        yield at_most(f"{kind}: let in, of {asked}", let_in[kind], most.get(kind, 0), "")
        refused = sum(statuses.get(code, 0) for code in REFUSALS[kind])
        yield at_least("  refused", refused, 1, "")
        odd = sorted(set(statuses) - {PASSES[kind]} - REFUSALS[kind])
        yield none_of(
            "  refused in another way", [f"{code}, {statuses[code]} times" for code in odd]
        )


def run(directory: Path, *, seconds: float = 45.0, slow: int = 200, crowd: int = 5000) -> Report:
    """Attack for so many seconds, with so many slow clients; then with a crowd of connections."""
    (directory / "crowd").mkdir()
    return report_of(
        [
            *overload_figures(directory, seconds=seconds, slow=slow),
            *crowd_figures(directory / "crowd", seconds=seconds, crowd=crowd),
        ]
    )


if __name__ == "__main__":
    main(run)
