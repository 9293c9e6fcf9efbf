"""Kubernetes, through its official client: one Pod for each agent.

The client finds its cluster as `kubectl` does, or inside one by its service account, which may only
create, get, list and delete Pods. So the order to join is in the Pod and not in a Secret: users
that may read Pods read a token that is good for one process.
"""

import asyncio
from collections.abc import Iterable, Mapping
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import msgspec

from coordinator.launchers.launcher import NotStarted
from coordinator.launchers.scheduler import Refused, SchedulerJob, SchedulerUnavailable
from muster.cluster.requests import LABELS, NAME, pod
from muster.contracts.errors import printable
from muster.contracts.job.spec import JobSpec
from muster.contracts.messages.attach import JOIN_EXITS, JoinOrder

NAMESPACE_FILE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
REQUEST_SECONDS: Final = (5.0, 15.0)  # to connect, and to answer

_TRANSIENT: Final = (409, 429, 500, 502, 503, 504)
_MISSING: Final = 404
_EXISTS: Final = "AlreadyExists"  # of the conflicts; a quota that others change is another one

_NOT_INSTALLED: Final = (
    "the client of Kubernetes is not installed here: pip install 'muster-train[kubernetes]'"
)


class Kubernetes:
    """See `Scheduler`."""

    name = "kubernetes"

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    async def check(self) -> None:
        try:
            await self.jobs()
        except SchedulerUnavailable as error:
            raise NotStarted(f"{error}: try kubectl get pods on the coordinator's host") from error

    async def submit(self, name: str, order: JoinOrder, spec: JobSpec) -> None:
        try:
            await self._call("create_namespaced_pod", body=pod(name, order, spec))
        except _Answer as answer:
            if answer.reason != _EXISTS:  # it exists: this was tried before
                kind = NotStarted if answer.status in _TRANSIENT else Refused
                raise kind(str(answer)) from answer
        except SchedulerUnavailable as error:
            if not isinstance(error.__cause__, ValueError):
                raise
            # The client checks Pods by models of its own. It has sent none.
            words = " ".join(str(error).split())
            raise Refused(f"the client of Kubernetes refuses the Pod: {words}") from error

    async def jobs(self) -> Mapping[str, SchedulerJob]:
        selector = ",".join(f"{key}={value}" for key, value in LABELS.items())
        try:
            pods = (await self._call("list_namespaced_pod", label_selector=selector)).items
        except _Answer as answer:
            raise SchedulerUnavailable(str(answer)) from answer
        names = [(pod.metadata.annotations or {}).get(NAME, pod.metadata.name) for pod in pods]
        return dict(zip(names, map(job_of, pods), strict=True))

    async def cancel(self, job_id: str) -> None:
        try:
            await self._call("delete_namespaced_pod", name=job_id)
        except _Answer as answer:
            if answer.status != _MISSING:
                raise SchedulerUnavailable(str(answer)) from answer

    async def forget(self, job_id: str) -> None:
        await self.cancel(job_id)

    @cached_property
    def _connection(self) -> tuple[Any, str]:
        """The API and our namespace. Raises `SchedulerUnavailable`."""
        try:
            client: Any = import_module("kubernetes.client")  # an extra
            config: Any = import_module("kubernetes.config")
        except ImportError as error:
            raise SchedulerUnavailable(_NOT_INSTALLED) from error
        own = client.Configuration()
        try:
            if "KUBERNETES_SERVICE_HOST" in self._environ:
                config.load_incluster_config(own)
                namespace = NAMESPACE_FILE.read_text().strip()
            else:
                path = self._environ.get("KUBECONFIG")
                config.load_kube_config(path, client_configuration=own)
                _, context = config.list_kube_config_contexts(path)
                namespace = context["context"].get("namespace", "default")
        except (config.ConfigException, OSError) as error:
            raise SchedulerUnavailable(f"no cluster is configured ({error})") from error
        own.retries = False  # the next list is one
        return client.CoreV1Api(client.ApiClient(own)), namespace

    async def _call(self, method: str, **fields: Any) -> Any:  # noqa: ANN401  as the client's own
        """Call a method of the client in a thread. Raises `SchedulerUnavailable` and `_Answer`."""

        def call() -> Any:  # noqa: ANN401
            api, namespace = self._connection
            asked = {"namespace": namespace, "_request_timeout": REQUEST_SECONDS, **fields}
            return getattr(api, method)(**asked)

        try:
            return await asyncio.to_thread(call)
        except (SchedulerUnavailable, OSError) as error:
            raise SchedulerUnavailable(printable(str(error))) from error
        except Exception as error:
            # Of the client and of urllib3, which need not be installed.
            status = getattr(error, "status", None)
            if not status:
                raise SchedulerUnavailable(printable(str(error))) from error
            raise _Answer(int(status), *_said(error)) from error


class _Answer(Exception):
    """The API has refused a request."""

    def __init__(self, status: int, words: str, reason: str) -> None:
        super().__init__(f"Kubernetes answers {status}: {words}")
        self.status, self.reason = status, reason


def _said(error: Exception) -> tuple[str, str]:
    """Return what the API says in its answer, and the reason in one word."""
    body = getattr(error, "body", None) or "{}"
    try:
        said = msgspec.json.decode(body)
    except msgspec.DecodeError:
        said = {}
    said = said if isinstance(said, dict) else {}
    words = said.get("message") or getattr(error, "reason", "") or error
    return printable(str(words)), str(said.get("reason"))


def job_of(found: Any) -> SchedulerJob:  # noqa: ANN401  a V1Pod
    """Return what a Pod says about its agent."""
    status, name = found.status, found.metadata.name
    phase = status.phase or "Pending"
    words = [phase, *_reasons(status)]
    return SchedulerJob(
        id=name,
        is_waiting=phase == "Pending",
        is_over=phase in {"Succeeded", "Failed"},
        words=f"Pod {name}: {': '.join(printable(word) for word in words)}, "
        f"since {found.metadata.creation_timestamp:%Y-%m-%dT%H:%M:%S}",
    )


def _reasons(status: Any) -> Iterable[str]:  # noqa: ANN401  a V1PodStatus
    """Yield why a Pod is not scheduled, not started, evicted or ended, as far as it says so."""
    if status.reason:
        yield f"{status.reason} {status.message or ''}".strip()
    for condition in status.conditions or ():
        if condition.status == "False" and condition.type == "PodScheduled":
            yield condition.message or condition.reason or condition.type
    for container in status.container_statuses or ():
        state = container.state
        if state is not None and state.waiting is not None and state.waiting.reason:
            yield f"{state.waiting.reason} {state.waiting.message or ''}".strip()
        if state is not None and state.terminated is not None and state.terminated.exit_code:
            code = state.terminated.exit_code
            reason = state.terminated.reason or "Error"  # or OOMKilled
            yield reason if reason != "Error" else JOIN_EXITS.get(code, f"exit code {code}")
