"""``muster up``: the API and the coordinator in the foreground, kept alive until Ctrl-C.

Ctrl-C and SIGTERM mean the same: ranks save and exit, their jobs go back to the queue and resume
at the next start. A second Ctrl-C does not wait for the ranks: the coordinator hands over, to the
next start. One alone does not do that, whatever began the end. A second SIGTERM says nothing new:
whoever sends it may not know of the first.
"""

import asyncio
import signal
import sys
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from api.preflight import refuse_door
from cli.certificate import own_names
from cli.keeper import Keeper
from cli.office import Office, sole_office
from cli.required_token import warn_of_no_admin
from cli.second_interrupt import SecondInterrupt
from cli.serving import serves
from cli.tls_key import warn_of_open_key
from cli.waits import PATIENCE_SECONDS
from cli.welcome import another_port, next_steps
from muster.contracts.environ import LOCAL_NAMES, DoorSettings, ServiceSettings, own_url
from muster.contracts.errors import MusterError
from muster.contracts.layout import DataDirectory
from muster.ports import free_port, is_free
from muster.remarks import remark
from store.place import refuse_unknown

LOOK_SECONDS: Final = 0.05
OFFICE_LOOK_SECONDS: Final = 1.0
STUBBORN_SECONDS: Final = 5.0
"""The API has nothing to save: this long after SIGTERM it is killed."""


class PortTaken(MusterError):
    """Somebody else listens where we were told to."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__(
            f"port {port} of {host} is taken: stop what listens there, choose another with "
            "MUSTER_PORT, or leave that unset for a free one"
        )


def serve(settings: ServiceSettings, environ: Mapping[str, str]) -> int:
    """Run the services until a signal; return the exit code.

    Raises `AlreadyUp`, `PortTaken`, `StoreUnavailable` for a URL that names no database, or what
    `refuse_door` does, and then nothing was started.
    """
    refuse_unknown(settings.database_url)
    with sole_office(DataDirectory(settings.data_dir)) as office:
        environ = {**environ, "MUSTER_PORT": str(_port(settings, environ))}
        door = DoorSettings.read(environ)
        warn_of_open_key(door)
        refuse_door(settings, door)
        warn_of_no_admin(settings, door)
        office.publish(own_url(environ), _names(door), _ca_file(door))
        return asyncio.run(_Household(settings, environ, office).run())


class _Household:
    def __init__(
        self, settings: ServiceSettings, environ: Mapping[str, str], office: Office
    ) -> None:
        self._office = office
        self._url = own_url(environ)
        self._door = DoorSettings.read(environ)
        self._data_dir = settings.data_dir
        self._orphan_timeout_seconds = settings.orphan_timeout_seconds
        self._api = Keeper("api", _command("api"), environ, _say)
        self._coordinator = Keeper("coordinator", _command("coordinator"), environ, _say)
        self._asked_to_end = asyncio.Event()
        self._was_interrupted = False

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._asked_to_end.set)
        loop.add_signal_handler(signal.SIGINT, self._begin_by_interrupt)
        services = [
            asyncio.ensure_future(self._api.run()),
            asyncio.ensure_future(self._coordinator.run()),
        ]
        asked = asyncio.ensure_future(self._asked_to_end.wait())
        welcome = asyncio.ensure_future(self._welcome())
        lost = asyncio.ensure_future(self._loss_of_office())
        await asyncio.wait([*services, asked, lost], return_when=asyncio.FIRST_COMPLETED)
        welcome.cancel()
        is_lost = lost.done()
        lost.cancel()
        codes = [service.result() for service in services if service.done()]
        await self._end(*services)
        _say("down")
        return next((code for code in codes if code), int(is_lost))

    def _begin_by_interrupt(self) -> None:
        self._was_interrupted = True
        self._asked_to_end.set()

    async def _loss_of_office(self) -> None:
        """Return once the data directory is not there any more, and say so: nobody else would."""
        while not self._office.is_lost():  # noqa: ASYNC110  a file: there is no event to wait for
            await asyncio.sleep(OFFICE_LOOK_SECONDS)
        _say(
            f"{self._data_dir} was removed, moved or replaced, and what runs can no longer be "
            "recorded there: the services end"
        )

    async def _welcome(self) -> None:
        """Say where we are once both services answer."""
        # Another process's readiness: there is no event to wait for.
        while not await asyncio.to_thread(serves, self._url):  # noqa: ASYNC110
            await asyncio.sleep(LOOK_SECONDS)
        self._api.has_served = self._coordinator.has_served = True
        _say(f"ready at {self._url}, with its data in {self._data_dir}")
        _say("next, in another terminal; `muster --help` has more:")
        for line in next_steps(self._url, self._data_dir, self._door):
            remark(line)
        _say("Ctrl-C lets every job save; they go on at the next start")

    async def _end(self, api: "asyncio.Future[int]", coordinator: "asyncio.Future[int]") -> None:
        """The coordinator first: while ranks save, the API still shows it."""
        loop = asyncio.get_running_loop()
        second = SecondInterrupt(self._hand_over, _say, loop.call_later)
        loop.add_signal_handler(signal.SIGINT, second.hear)
        if self._was_interrupted:
            second.await_echoes()
        with suppress(OSError):  # a full disk keeps nobody from ending
            self._office.publish_end()
        if not coordinator.done():
            way = " (Ctrl-C again does not wait for them)" if self._was_interrupted else ""
            _say(f"ranks save and exit …{way}")
        have_ended = threading.Event()
        telling = asyncio.ensure_future(asyncio.to_thread(self._tell_who_remains, have_ended))
        self._coordinator.end(signal.SIGINT)
        await coordinator
        second.close()
        loop.add_signal_handler(signal.SIGINT, self._asked_to_end.set)  # nobody is left to hurry
        have_ended.set()
        self._api.end(signal.SIGTERM)
        try:
            await asyncio.wait_for(asyncio.shield(api), STUBBORN_SECONDS)
        except TimeoutError:
            self._api.end(signal.SIGKILL)
            await api
        await asyncio.wait([telling])

    def _tell_who_remains(self, have_ended: threading.Event) -> None:
        """Tell a person who waits longer than most have to what it is that they wait for."""
        if have_ended.wait(PATIENCE_SECONDS):
            return
        from cli.remaining import tell_who_remains  # noqa: PLC0415  brings in httpx

        ca_file = _ca_file(self._door)
        tell_who_remains(self._url, str(ca_file) if ca_file else None, have_ended.wait, _say)

    def _hand_over(self) -> None:
        self._coordinator.end(signal.SIGTERM)
        _say(
            "does not wait: the next start takes the jobs up; without one within "
            f"{self._orphan_timeout_seconds:g} s their ranks save and exit by themselves"
        )


def _ca_file(door: DoorSettings) -> Path | None:
    """Return the certificate that clients have to be told of, if it is none that they know."""
    if door.tls_certfile is None or not own_names(door.tls_certfile, door.tls_keyfile):
        return None
    return door.tls_certfile


def _names(door: DoorSettings) -> Iterable[str]:
    """Return by which names this machine's clients may call the API."""
    return sorted({*LOCAL_NAMES, *door.allowed_hosts})


def _command(module: str) -> list[str]:
    return [sys.executable, "-P", "-m", module]


def _port(settings: ServiceSettings, environ: Mapping[str, str]) -> int:
    """Return the port to use: the one asked for, the usual one, or a free one, said aloud."""
    if settings.port == 0:
        return free_port(settings.host)
    if is_free(settings.host, settings.port):
        return settings.port
    if environ.get("MUSTER_PORT"):
        raise PortTaken(settings.host, settings.port)
    port = free_port(settings.host)
    _say(another_port(settings.port, port))
    return port


def _say(sentence: str) -> None:
    remark(f"muster: {sentence}")
