"""Talking to the API: what it refuses is a sentence, and so is its absence."""

import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Final, Self

import httpx

from muster.contracts.errors import MusterError

TIMEOUT_SECONDS: Final = 30.0
RETRY_SECONDS: Final = 2.0
"""An API that was killed is usually there again within so long, as `muster up` sees to it."""

LOOK_SECONDS: Final = 0.1


class ServerUnreachable(MusterError):
    """Nobody answers."""

    def __init__(self, url: str) -> None:
        super().__init__(
            f"nobody answers at {url}: if `muster up` runs, it starts the API again within "
            "seconds, so try again; is it on another port? set MUSTER_PORT to what `muster up` "
            "printed, or start it"
        )


class ServerRefused(MusterError):
    """The API answered with a problem."""

    def __init__(self, detail: str, status: int) -> None:
        super().__init__(f"{detail} (HTTP {status})")
        self.status = status


class Server:
    """One API, with one connection kept open."""

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.url = url
        self._monotonic = monotonic
        self._sleep = sleep
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._http = httpx.Client(
            base_url=url, headers=headers, timeout=TIMEOUT_SECONDS, trust_env=False
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self._http.close()

    def get(self, path: str) -> Any:  # noqa: ANN401  whatever JSON the API answers
        """Return the answer; raises `ServerUnreachable` or `ServerRefused`.

        Tried again for a while, unlike what changes anything: that may have been done unanswered.
        """
        until = self._monotonic() + RETRY_SECONDS
        while True:
            try:
                return self._ask("GET", path, None)
            except ServerUnreachable:
                if self._monotonic() >= until:
                    raise
            self._sleep(LOOK_SECONDS)

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:  # noqa: ANN401  see above
        """Return the answer; raises `ServerUnreachable` or `ServerRefused`."""
        return self._ask("POST", path, body)

    def patch(self, path: str, body: Mapping[str, Any]) -> Any:  # noqa: ANN401  see above
        """Return the answer; raises `ServerUnreachable` or `ServerRefused`."""
        return self._ask("PATCH", path, body)

    def delete(self, path: str) -> Any:  # noqa: ANN401  see above
        """Return the answer; raises `ServerUnreachable` or `ServerRefused`."""
        return self._ask("DELETE", path, None)

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:  # noqa: ANN401
        try:
            answer = self._http.request(method, path, json=body)
        except httpx.TransportError as error:
            raise ServerUnreachable(self.url) from error
        if answer.is_error:
            raise ServerRefused(_detail(answer), answer.status_code)
        try:
            return answer.json()
        except ValueError as error:
            raise ServerRefused(
                f"what answers at {self.url} is not Muster", answer.status_code
            ) from error


def _detail(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return answer.reason_phrase or "no reason given"
