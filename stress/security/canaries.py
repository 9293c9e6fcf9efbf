"""Looks for 25 secrets in every place where one could leak.

``python -m stress.security.canaries`` runs a whole installation over PostgreSQL: secrets of jobs
from files and from the environment, tokens, a password, a key. Jobs succeed, crash, fail to start,
hang and train, and services are killed. Then it searches every file, response, row, command line
and the environments of agents. A program that prints its own secrets has them in its own log, and
there they must be found. A decoy that is not secret goes through the same paths and must be found
in every place, which proves that the search works.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from sqlalchemy import make_url

from cli.output import table
from muster.contracts.token import Scope
from muster.runtime.secrets import SecretStore
from stress.runner import Report, main
from stress.security.canary_jobs import CARELESS, jobs
from stress.security.canary_places import ProcessWatch, Search, answers, files_below, rows
from tests.support.api_service import Service
from tests.support.certificates import key_of, own_certificate
from tests.support.installation import Installation, is_over, is_running, write_small_dataset
from tests.support.postgres_server import running_server

COUNT = 25
FILES = 10
VARIABLES = 7

OWN_WORDS = "output of careless programs"

OWN_ANSWERS, TOKEN_ANSWERS = "answers to GET, own user", "answers to GET, token that may read"

PLACES = (
    OWN_ANSWERS,
    TOKEN_ANSWERS,
    "command lines of processes",
    "environments of agents",
    "files",
    "error output of services",
    "rows of the database",
)
"""Places where the decoy must be found."""

FORBIDDEN = {"/tokens"}
"""What a read token must not see."""

REFUSED_SECONDS = 60.0


def canary() -> str:
    """Return a unique value."""
    return f"canary{os.urandom(12).hex()}"


@dataclass
class Canaries:
    """All values that must not leak."""

    files: Mapping[str, str] = field(
        default_factory=lambda: {f"kept-{number}": canary() for number in range(FILES)}
    )
    variables: Mapping[str, str] = field(
        default_factory=lambda: {f"LENT_{number}": canary() for number in range(VARIABLES)}
    )
    password: str = field(default_factory=canary)
    token: str = field(default_factory=lambda: canary() + canary())

    def known(self) -> dict[str, str]:
        """Return the values by description."""
        own = {"the database's password": self.password, "MUSTER_TOKEN": self.token}
        return {**self.files, **self.variables, **own}

    def references(self) -> dict[str, str]:
        """Return the secrets that jobs request: all but the last of each kind."""
        kept = [f"file:{name}" for name in list(self.files)[:-1]]
        lent = [f"env:{name}" for name in list(self.variables)[:-1]]
        return {f"SECRET_{number}": text for number, text in enumerate([*kept, *lent])}


class CanaryRun:
    """An installation with secrets, and what its jobs leave."""

    def __init__(self, root: Path, database_url: str) -> None:
        self.canaries = Canaries()
        self.search = Search(self.canaries.known(), decoy=f"decoy{os.urandom(12).hex()}")
        self.refused: list[str] = []
        """Responses that contain nothing to search."""
        self.statuses: dict[str, str] = {}
        url = make_url(database_url).set(password=self.canaries.password)
        self._database_url = url.render_as_string(hide_password=False)
        self._elsewhere = root / "elsewhere"
        self._root = root / "installation"
        for directory in (self._elsewhere, self._root):
            directory.mkdir()
        write_small_dataset(self._root / "shards")
        self._installation = Installation(
            self._root,
            MUSTER_DATABASE_URL=self._database_url,
            MUSTER_TOKEN=self.canaries.token,
            MUSTER_SECRET_ENV=",".join(self.canaries.variables),
            DECOY=self.search.decoy,
            **self.canaries.variables,
        )
        self._safe = SecretStore(self._installation.files.secrets)
        for name, value in self.canaries.files.items():
            self._safe.put(name, value)

    def play(self) -> None:
        """Run everything while all processes are watched, then search what is left."""
        with ProcessWatch(self.search), self._installation:
            self._speak_tls()
            reader = self._hand_out_tokens()
            self._reach_for_no_database()
            self._run_jobs()
            self._look_at_answers(OWN_ANSWERS, {}, forbidden=set())
            shown = {"Authorization": f"Bearer {reader}"}
            self._look_at_answers(TOKEN_ANSWERS, shown, forbidden=FORBIDDEN)
        for what, text in rows(self._database_url):
            self._look("rows of the database", what, text)
        for name in self.canaries.files:
            self._safe.remove(name)
        for path, text in files_below(self._root):
            is_log = "/logs/" in path or path.endswith(".error.json")
            self._look("files", path, text, is_log=is_log)

    def _look_at_answers(
        self, place: str, headers: Mapping[str, str], forbidden: Collection[str]
    ) -> None:
        with httpx.Client(base_url=self._installation.url, headers=headers) as client:
            for answer in answers(client):
                path = answer.request.url.path
                text = f"{answer.headers}\n{answer.text}"
                self._look(place, path, text, is_log="/logs" in path)
                if answer.is_success == (path in forbidden):
                    self.refused.append(f"{place}, {path}: {answer.status_code}")

    def _look(self, place: str, what: str, text: str, *, is_log: bool = False) -> None:
        is_careless = is_log and any(f"/{job_id}/" in f"/{what}" for job_id in CARELESS)
        self.search.look(OWN_WORDS if is_careless else place, what, text)

    def _run_jobs(self) -> None:
        installation = self._installation
        described = jobs(self._root, self.canaries.references(), self.search.decoy)
        for job_id, fields in described.items():
            installation.submit(job_id=job_id, **fields)
        installation.wait_until("does-not-stop", is_running)
        installation.api.end(signal.SIGKILL)
        installation.start()
        installation.restart_coordinator()
        installation.stop("does-not-stop", grace_seconds=0.5)
        for job_id in described:
            self.statuses[job_id] = installation.wait_until(job_id, is_over)["status"]

    def _hand_out_tokens(self) -> str:
        """Create tokens and use an invalid one; return a token with read scope."""
        texts = {}
        for name, scope in [*((f"{scope}", scope) for scope in Scope), ("revoked", Scope.READ)]:
            made = self._installation.request(
                "POST", "/tokens", json={"name": name, "scope": scope}
            )
            texts[name] = made.json()["token"]
            self.search.canaries[f"the token {name}"] = texts[name].split("_")[2]
        self._installation.request("DELETE", "/tokens/revoked")
        wrong = self.search.canaries["a wrong token"] = canary()
        for text in (wrong, texts["revoked"]):
            shown = {"Authorization": f"Bearer {text}"}
            refused = self._installation.request("GET", "/jobs", headers=shown)
            assert refused.status_code == httpx.codes.UNAUTHORIZED
        return texts["read"]

    def _speak_tls(self) -> None:
        """Start another API with TLS and call it without TLS."""
        certificate = own_certificate(self._elsewhere)
        key = key_of(certificate)
        # A line from its middle, which is unique.
        self.search.canaries["the key of TLS"] = key.read_text().splitlines()[2]
        place = self._root / "tls"
        place.mkdir()
        service = Service(
            place,
            MUSTER_DATABASE_URL=self._database_url,
            MUSTER_TLS_CERTFILE=str(certificate),
            MUSTER_TLS_KEYFILE=str(key),
        )
        service.start()
        service.raw(b"GET /jobs HTTP/1.1\r\n\r\n")
        service.end(signal.SIGTERM)

    def _reach_for_no_database(self) -> None:
        """Start services without a database, and record what they print."""
        away = make_url(self._database_url).set(
            host="127.0.0.1", port=1, database=self.search.decoy, query={}
        )
        url = away.render_as_string(hide_password=False)
        for module in ("api", "coordinator"):
            ended = subprocess.run(
                [sys.executable, "-P", "-m", module],
                cwd=self._root,
                env={**self._installation.environment, "MUSTER_DATABASE_URL": url},
                capture_output=True,
                text=True,
                timeout=REFUSED_SECONDS,
                check=False,
            )
            self._look("error output of services", module, ended.stdout + ended.stderr)


def run(directory: Path) -> Report:
    """Run everything once, and report every secret that was found where it must not be."""
    with running_server() as server, server.database("canaries") as database_url:
        done = CanaryRun(directory, database_url)
        done.play()
    search, rows, faults = done.search, [], list(done.refused)
    for place in sorted({*PLACES, *search.looked_at}):
        found, is_own = search.hits.get(place, set()), place == OWN_WORDS
        rows.append((place, search.looked_at[place], len(found), "> 0" if is_own else "0"))
        faults += () if is_own else sorted(found)
    # The search itself has to be proven.
    faults += [f"the decoy was not found in {it}" for it in set(PLACES) - search.decoyed]
    if not search.hits.get(OWN_WORDS):
        faults.append(f"nothing was found in {OWN_WORDS}")
    if len(search.canaries) != COUNT:
        faults.append(f"{len(search.canaries)} secrets were searched for, not {COUNT}")
    lines = [*table(("place", "looked at", "found", "goal"), rows)]
    lines += [f"{job_id} {status}" for job_id, status in done.statuses.items()]
    return Report(lines, faults)


if __name__ == "__main__":
    main(run)
