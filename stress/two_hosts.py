"""Two hosts with a coordinator each and one PostgreSQL over TCP: the lease moves, no bit does.

``python -m stress.two_hosts [FAULTS] [SEED]`` trains jobs while the coordinator that leads is
killed (and started again, as `muster up` does), cut off from the database, or lost with its whole
host. A killed one must be replaced without a restart of a rank. One that was cut off must write
nothing more, also when the network delivers what it had sent: triggers record who writes in which
epoch of the lease.
"""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import URL, create_engine, text

from database.engine import Database
from database.leases import Leases
from database.records import Lease
from muster.checkpoints.comparison import digests
from muster.checkpoints.listing import checkpoint_dirs
from muster.contracts.settings.paths import checkpoints_of_job
from stress.frozen_hosts import CoordinatorHost
from stress.runner import Report, chance, main, say
from stress.stale.jobs import COMMON, KINDS
from tests.support.hosts import HERE
from tests.support.installation import Installation, await_value, is_over, write_small_dataset
from tests.support.postgres_server import tcp_server

FAULTS = ("killed", "cut off", "lost")
TRAINED = ("independent", "shared memory")
PACE_SECONDS = 0.02
NEW_STEPS = 10
FENCED = 75
"""The exit code of a coordinator that has lost its lease."""

WATCHED = ("jobs", "workers", "attempts", "members", "commits", "epochs", "events")
RECORDER = """
CREATE TABLE writes (writer text, epoch bigint);
CREATE FUNCTION record_write() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
  INSERT INTO writes SELECT current_setting('application_name'), epoch FROM leases;
  RETURN NULL;
END $$;
"""
SECOND_WRITERS = """
SELECT epoch, string_agg(DISTINCT writer, ' and ') FROM writes WHERE writer LIKE 'host-%'
GROUP BY epoch HAVING count(DISTINCT writer) > 1
"""


class TwoHosts:
    """The hosts, what leads from one of them, and the jobs."""

    def __init__(self, installation: Installation, url: URL, stack: ExitStack) -> None:
        self.installation = installation
        self.faults: list[str] = []
        self.kept = self.moved = 0
        """Ranks that ran on at a takeover, and those that another host started again."""
        self._database = Database.open(url.render_as_string(hide_password=False))
        stack.callback(self._database.close)
        self._engine = create_engine(url, isolation_level="AUTOCOMMIT")
        stack.callback(self._engine.dispose)
        self._forwarders: dict[str, subprocess.Popen[str]] = {}
        self._ports: dict[str, int] = {}
        self._hosts: dict[str, CoordinatorHost] = {}
        stack.callback(self._end)
        self._run(RECORDER)
        for table in WATCHED:
            event = f"AFTER INSERT OR UPDATE ON {table} FOR EACH STATEMENT"
            self._run(f"CREATE TRIGGER recorder {event} EXECUTE FUNCTION record_write()")
        for name in ("host-a", "host-b"):
            command = [sys.executable, str(HERE / "forwarder.py"), str(url.port)]
            forwarder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            self._forwarders[name] = forwarder
            assert forwarder.stdout is not None
            self._ports[name] = int(forwarder.stdout.readline())
            place = url.set(port=self._ports[name], query={"application_name": name})
            address = place.render_as_string(hide_password=False)
            self._hosts[name] = CoordinatorHost(installation, name, MUSTER_DATABASE_URL=address)

    def lease(self) -> Lease | None:
        return Leases(self._database).current()

    def strike(self, fault: str, job_ids: Mapping[str, str]) -> None:
        """Do it to the host that leads, and wait until all jobs have gone on."""
        lease = await_value(self.lease, lambda: "no coordinator")
        leader = lease.process.node
        before = {job_id: self._ranks(job_id) for job_id in job_ids.values()}
        host = self._hosts[leader]
        began = time.monotonic()
        if fault == "killed":
            host.coordinator.send_signal(signal.SIGKILL)
            host.coordinator.wait()
            host.start_coordinator()
        elif fault == "cut off":
            self._forwarders[leader].send_signal(signal.SIGSTOP)
        else:
            host.power_off()
        now = await_value(lambda: self._next(lease), lambda: f"nothing follows {leader}")
        seconds = time.monotonic() - began
        for job_id in job_ids.values():
            self._await_steps(job_id)
        has_moved = now.process.node != leader
        if fault == "cut off":
            self._forwarders[leader].send_signal(signal.SIGCONT)
            if (code := host.coordinator.wait()) != FENCED:
                self.faults.append(f"the coordinator of {leader} ended with {code}")
            host.start_coordinator()
        elif fault == "lost":
            host.power_on()
            host.start_coordinator()
        elif not has_moved:  # otherwise the new process came later than the lease's end
            self._compare(before)
        self.moved += has_moved * sum(map(len, before.values()))
        say(f"{leader} {fault}: {now.process.node} leads after {seconds:.1f} s")

    def second_writers(self) -> Iterator[str]:
        with self._engine.connect() as connection:
            writers = set(connection.scalars(text("SELECT DISTINCT writer FROM writes")))
            if not self._hosts.keys() <= writers:
                yield f"only {writers} wrote"
            for epoch, writers in connection.execute(text(SECOND_WRITERS)):
                yield f"{writers} wrote in epoch {epoch}"

    def _next(self, former: Lease) -> Lease | None:
        lease = self.lease()
        return lease if lease is not None and lease.epoch > former.epoch else None

    def _ranks(self, job_id: str) -> dict[str, Any]:
        workers = self.installation.see(job_id)["workers"]
        alive = (one for one in workers if one["pid"])
        return {f"{it['rank']}.{it['attempt']}": (it["pid"], it["restarts"]) for it in alive}

    def _compare(self, before: Mapping[str, Mapping[str, Any]]) -> None:
        for job_id, ranks in before.items():
            after = self._ranks(job_id)
            for worker, process in ranks.items():
                if after.get(worker, process) != process:  # one that has finished has no pid
                    self.faults.append(f"{job_id}, {worker}: {process} became {after[worker]}")
                self.kept += worker in after

    def _await_steps(self, job_id: str) -> None:
        target = self.installation.see(job_id)["step"] + NEW_STEPS
        self.installation.wait_until(job_id, lambda seen: is_over(seen) or seen["step"] >= target)

    def _run(self, statement: str) -> None:
        with self._engine.connect() as connection:
            connection.exec_driver_sql(statement)

    def _end(self) -> None:
        for forwarder in self._forwarders.values():
            forwarder.send_signal(signal.SIGCONT)
        for host in self._hosts.values():
            host.power_off()
        for forwarder in self._forwarders.values():
            forwarder.kill()
            forwarder.communicate()


@contextmanager
def two_hosts(directory: Path) -> Iterator[TwoHosts]:
    with ExitStack() as stack:
        server = stack.enter_context(tcp_server())
        place = stack.enter_context(server.database("hosts"))
        installation = Installation(directory, MUSTER_DATABASE_URL=place)
        stack.callback(installation.close)
        write_small_dataset(directory / "shards")
        installation.start_api()
        pair = TwoHosts(installation, server.admin.set(database="hosts"), stack)
        yield pair
        installation.end_jobs()


def run(directory: Path, faults: int = 30, seed: int = 0, *, epochs: int = 60) -> Report:
    """Strike so many times, in every way; a job of so many epochs outlasts a few strikes."""
    random = chance(seed)
    order = [fault for _ in range(-(-faults // 3)) for fault in random.sample(FAULTS, 3)][:faults]
    with two_hosts(directory) as pair:
        installation = pair.installation

        def submit(kind: str, **fields: object) -> str:
            return installation.submit(**COMMON, **KINDS[kind], epochs=epochs, **fields)

        def result(job_id: str) -> object:
            installation.complete(job_id)
            return list(
                digests(checkpoint_dirs(checkpoints_of_job(installation.checkpoint_dir, job_id)))
            )

        calm = {kind: result(submit(kind)) for kind in TRAINED}
        while order:
            job_ids = {kind: submit(kind, sleep_sec=PACE_SECONDS) for kind in TRAINED}
            for job_id in job_ids.values():
                installation.wait_until(job_id, lambda seen: seen["step"] >= NEW_STEPS)
            while order and not any(is_over(installation.see(it)) for it in job_ids.values()):
                time.sleep(random.random())
                pair.strike(order.pop(), job_ids)
            for kind, job_id in job_ids.items():
                if result(job_id) != calm[kind]:
                    pair.faults.append(f"{job_id}: other bits than an undisturbed run")
            audit = installation.request("GET", f"/jobs/{job_ids['shared memory']}/audit").json()
            if not (audit["complete"] and audit["exactly_once"]):
                pair.faults.append(f"{audit}")
        pair.faults += pair.second_writers()
        # On a busy machine a coordinator that is started again may come after the lease's end.
        if not pair.moved or (faults > len(FAULTS) and not pair.kept):
            pair.faults.append(f"{pair.kept} ranks were kept and {pair.moved} moved: no test")
        lines = [f"{faults} faults; {pair.kept} ranks ran on, {pair.moved} were started elsewhere"]
    return Report(lines, pair.faults)


if __name__ == "__main__":
    main(run)
