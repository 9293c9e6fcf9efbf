"""Secrets that sing where they should not be: 25 of them, and every place where one could turn up.

``python -m stress.security.canaries`` runs a whole installation over PostgreSQL: secrets of jobs
from files and from the environment, tokens, a password, a key. Jobs succeed, crash, cannot start,
hang and train, services are killed. Then every file, answer, row, command line and the environments
of agents are looked through. A program that prints its own secrets has them in its own log, and
there they must be found. A decoy, which is no secret, goes through all of it, and every place has
to show it: so it is known that the search finds.
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from sqlalchemy import make_url

from muster.contracts.token import Scope
from muster.datasets.synthetic import synthetic
from muster.datasets.writer import write_dataset
from muster.runtime.secrets import SecretStore
from stress.security.canary_jobs import CARELESS, jobs
from stress.security.canary_places import ProcessWatch, Search, answers, files_below, rows
from tests.integration.api.service import Service
from tests.support.certificates import key_of, own_certificate
from tests.support.installation import Installation, is_over, is_running
from tests.support.postgres_server import running_server

COUNT = 25
FILES = 10
VARIABLES = 7

OWN_WORDS = "what careless programs have said themselves"

OWN_ANSWERS, TOKEN_ANSWERS = "answers to GET, own user", "answers to GET, token that may read"

PLACES = (
    OWN_ANSWERS,
    TOKEN_ANSWERS,
    "command lines of processes",
    "environments of agents",
    "files",
    "last words of services",
    "rows of the database",
)
"""Where the decoy has to be found."""

FORBIDDEN = {"/tokens"}
"""What a token that may read is not shown."""

REFUSED_SECONDS = 60.0


def canary() -> str:
    """Return what nobody else would say."""
    return f"canary{os.urandom(12).hex()}"


@dataclass
class Canaries:
    """All that must stay unheard."""

    files: Mapping[str, str] = field(
        default_factory=lambda: {f"kept-{number}": canary() for number in range(FILES)}
    )
    variables: Mapping[str, str] = field(
        default_factory=lambda: {f"LENT_{number}": canary() for number in range(VARIABLES)}
    )
    password: str = field(default_factory=canary)
    token: str = field(default_factory=lambda: canary() + canary())

    def known(self) -> dict[str, str]:
        """Return each by what it is."""
        own = {"the database's password": self.password, "MUSTER_TOKEN": self.token}
        return {**self.files, **self.variables, **own}

    def references(self) -> dict[str, str]:
        """Return what jobs ask for: all but the last of each kind."""
        kept = [f"file:{name}" for name in list(self.files)[:-1]]
        lent = [f"env:{name}" for name in list(self.variables)[:-1]]
        return {f"SECRET_{number}": text for number, text in enumerate([*kept, *lent])}


class Scene:
    """An installation with secrets, and what its jobs leave."""

    def __init__(self, root: Path, database_url: str) -> None:
        self.canaries = Canaries()
        self.search = Search(self.canaries.known(), decoy=f"decoy{os.urandom(12).hex()}")
        self.refused: list[str] = []
        """What was answered with nothing to look at."""
        self.statuses: dict[str, str] = {}
        url = make_url(database_url).set(password=self.canaries.password)
        self._database_url = url.render_as_string(hide_password=False)
        self._elsewhere = root / "elsewhere"
        self._root = root / "installation"
        for directory in (self._elsewhere, self._root):
            directory.mkdir()
        write_dataset(
            self._root / "shards", synthetic(samples=512, shards=8, features=8, classes=3)
        )
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
        """Let everything happen while all processes are watched, and look at what is left."""
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
        """Make tokens, and show one that is none; return one that may read."""
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
        """Let another API of the same installation speak TLS, and be called without it."""
        certificate = own_certificate(self._elsewhere)
        key = key_of(certificate)
        # The line in its middle, of which all is its own.
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
        """Start services whose database is not there, and note what they say."""
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
            self._look("last words of services", module, ended.stdout + ended.stderr)


def sing(root: Path, database_url: str) -> Scene:
    """Return a scene that was played below `root`."""
    scene = Scene(root, database_url)
    scene.play()
    return scene


def report(scene: Scene) -> Iterator[str]:
    search = scene.search
    yield f"{len(search.canaries)} secrets, {len(scene.statuses)} jobs: " + ", ".join(
        f"{job_id} {status}" for job_id, status in scene.statuses.items()
    )
    yield f"{'place':46}{'looked at':>10}{'found':>7}  goal   decoy"
    for place in sorted({*PLACES, *search.looked_at}):
        found = search.hits.get(place, set())
        goal = "> 0" if place == OWN_WORDS else "0"
        decoy = "found" if place in search.decoyed else "MISSED" if place in PLACES else ""
        yield f"{place:46}{search.looked_at[place]:10}{len(found):7}  {goal:5}  {decoy}"
        if place != OWN_WORDS:
            yield from sorted(found)
    yield f"refused, or shown to somebody else: {len(scene.refused)}; goal: 0"
    yield from scene.refused


def is_good(scene: Scene) -> bool:
    """Whether every secret was looked for, found where it must be and nowhere else.

    And whether the looking would have found it: each place has shown the decoy.
    """
    hits = dict(scene.search.hits)
    return (
        bool(hits.pop(OWN_WORDS, set()))
        and not any(hits.values())
        and len(scene.search.canaries) == COUNT
        and scene.search.decoyed >= set(PLACES)
        and not scene.refused
    )


def main() -> int:
    """Run it, print what came of it, and return 1 if a secret was found."""
    with (
        running_server() as server,
        server.database("canaries") as database_url,
        tempfile.TemporaryDirectory() as directory,
    ):
        scene = sing(Path(directory), database_url)
    for line in report(scene):
        print(line, flush=True)
    return int(not is_good(scene))


if __name__ == "__main__":
    sys.exit(main())
