"""A stand-in for Kubernetes: the small part of its API that we use, and Pods as processes of hosts.

Each Pod is checked against the strict schema of a real version, and its container becomes a process
of a test host, the next one each time. The API listens where the coordinator runs.
"""

import importlib.util
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import cycle
from pathlib import Path
from typing import Any, Final

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from tests.support.hosts import Host, Process

NAMESPACE = "training-system"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
VERSION = "1.37"
CONFIG = """apiVersion: v1
kind: Config
current-context: test
contexts: [{{name: test, context: {{cluster: test, user: test, namespace: {namespace}}}}}]
clusters: [{{name: test, cluster: {{server: "http://127.0.0.1:{port}"}}}}]
users: [{{name: test, user: {{token: test}}}}]
"""


def needs_kubernetes() -> pytest.MarkDecorator:
    names = ("kubernetes", "kubernetes_validate")
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    reason = f"not installed: {', '.join(missing)}"
    return pytest.mark.skipif(bool(missing), reason=reason)


class Kubernetes:
    """The API; `answers` are status codes that it gives in place of its next answers.

    See `SchedulerUnderTest`.
    """

    name = "kubernetes"
    fields: Final = {
        "engine": "kubernetes",
        "engine_options": {"image": "REGISTRY/muster-coordinator", "ranks_per_host": 2},
    }
    refused: Final = {"image": "i", "tolerations": [{"keys": "k"}]}, "keys"
    held: Final = "Pending: no node fits, since"
    taken_away: Final = "Evicted The node was low on memory."

    def __init__(self, root: Path, machines: Sequence[Host]) -> None:
        self._nodes = cycle(machines)
        self._pods: dict[str, dict[str, Any]] = {}
        self._processes: dict[str, Process] = {}
        self.answers: list[int] = []
        self._is_held = False  # no Pod is scheduled
        routes = [
            Route(PODS, self._create, methods=["POST"]),
            Route(PODS, self._list, methods=["GET"]),
            Route(PODS + "/{name}", self._delete, methods=["DELETE"]),
        ]
        listening = machines[0].open_socket()
        listening.bind(("127.0.0.1", 0))
        config = root / "kubeconfig"
        self.port = listening.getsockname()[1]
        config.write_text(CONFIG.format(namespace=NAMESPACE, port=self.port))
        self.environment = {"KUBECONFIG": str(config)}
        settings = uvicorn.Config(Starlette(routes=routes), log_level="warning")
        self._server = uvicorn.Server(settings)
        run = {"sockets": [listening]}
        self._thread = threading.Thread(target=self._server.run, kwargs=run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()
        for process in self._processes.values():
            process.send_signal(signal.SIGKILL)

    def jobs(self) -> dict[str, str]:
        """Return the phases of all Pods by their names."""
        return {name: pod["status"]["phase"] for name, pod in list(self._pods.items())}

    def hold(self, *, is_held: bool) -> None:
        self._is_held = is_held

    def take_away(self, name: str) -> None:
        """Evict a Pod, as a node without memory does."""
        words = {"reason": "Evicted", "message": "The node was low on memory."}
        self._pods[name]["status"] |= words
        self._processes[name].send_signal(signal.SIGTERM)

    @contextmanager
    def is_away(self) -> Iterator[None]:
        self.answers += [503] * 1000
        try:
            yield
        finally:
            self.answers.clear()

    async def _create(self, request: Request) -> JSONResponse:
        import kubernetes_validate  # noqa: PLC0415  not installed everywhere

        if self.answers:
            return _failure(self.answers.pop(0), "as the test wants")
        pod = await request.json()
        name = pod["metadata"]["name"]
        if name in self._pods:
            return _failure(409, f"pods {name!r} already exists", "AlreadyExists")
        try:
            kubernetes_validate.validate(pod, VERSION, strict=True)
        except kubernetes_validate.ValidationError as error:
            return _failure(422, str(error.message))
        pod["metadata"]["creationTimestamp"] = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
        pod["status"] = {"phase": "Pending"}
        self._pods[name] = pod
        self._update()
        return JSONResponse(pod, 201)

    async def _list(self, request: Request) -> JSONResponse:
        if self.answers:
            return _failure(self.answers.pop(0), "as the test wants")
        self._update()
        wanted = dict(one.split("=") for one in request.query_params["labelSelector"].split(","))
        pods = [
            it for it in self._pods.values() if wanted.items() <= it["metadata"]["labels"].items()
        ]
        return JSONResponse({"apiVersion": "v1", "kind": "PodList", "metadata": {}, "items": pods})

    async def _delete(self, request: Request) -> JSONResponse:
        name = request.path_params["name"]
        if name not in self._pods:
            return _failure(404, f"pods {name!r} not found")
        pod = self._pods[name]
        pod["metadata"]["deletionTimestamp"] = pod["metadata"]["creationTimestamp"]
        if name in self._processes:
            self._processes[name].send_signal(signal.SIGTERM)
        self._update()
        return JSONResponse(pod)

    def _update(self) -> None:
        """Start Pods that wait, note which have ended, and remove those that were deleted."""
        for name, pod in list(self._pods.items()):
            is_deleted, status = "deletionTimestamp" in pod["metadata"], pod["status"]
            process = self._processes.get(name)
            if process is None and self._is_held:
                condition = {"type": "PodScheduled", "status": "False", "message": "no node fits"}
                status["conditions"] = [condition]
            elif process is None and not is_deleted:
                self._processes[name] = self._run(pod, next(self._nodes))
                status |= {"phase": "Running", "conditions": []}
            elif process is not None and (code := process.poll()) is not None:
                status["phase"] = "Failed" if code else "Succeeded"
                status["containerStatuses"] = [_ended(code)]
            if is_deleted and (process is None or process.poll() is not None):
                del self._pods[name]

    def _run(self, pod: dict[str, Any], node: Host) -> Process:
        (container,) = pod["spec"]["containers"]
        own = {one["name"]: one["value"] for one in container["env"]}
        words = [sys.executable, *container["command"][1:]]
        return node.start(words, {"PATH": os.environ["PATH"], **own}, cwd=Path("/"))


def _ended(code: int) -> dict[str, Any]:
    terminated = {"exitCode": code if code >= 0 else 128 - code, "reason": "Error"}
    required = {"name": "agent", "image": "", "imageID": "", "ready": False, "restartCount": 0}
    return {**required, "state": {"terminated": terminated}}


def _failure(code: int, message: str, reason: str = "") -> JSONResponse:
    said = {"kind": "Status", "code": code, "reason": reason, "message": message}
    return JSONResponse(said, code)
