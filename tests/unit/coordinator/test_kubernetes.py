"""What the answers of Kubernetes mean, without its client."""

import asyncio
import json

import pytest

from coordinator.launchers.kubernetes import Kubernetes
from coordinator.launchers.launcher import NotStarted
from coordinator.launchers.scheduler import Refused
from muster.contracts.job.spec import JobSpec
from muster.contracts.messages.attach import JoinOrder

ORDER = JoinOrder(job_uid="u", host="kubernetes-1", agent_number=1, token="t", coordinator=None)  # noqa: S106
SPEC = JobSpec(engine="kubernetes", engine_options={"image": "IMAGE"})


class ApiException(Exception):
    def __init__(self, status: int, reason: str) -> None:
        self.status = status
        self.body = json.dumps({"kind": "Status", "reason": reason, "message": "as said"})


@pytest.mark.parametrize(
    ("status", "reason", "kind"),
    [
        (409, "AlreadyExists", None),
        (409, "Conflict", NotStarted),  # the quota of the namespace was changed meanwhile
        (503, "ServiceUnavailable", NotStarted),
        (403, "Forbidden", Refused),
    ],
)
def test_a_pod_that_exists_is_no_other_conflict(
    status: int, reason: str, kind: type[NotStarted] | None
) -> None:
    class Api:
        def create_namespaced_pod(self, *_: object, **__: object) -> None:
            raise ApiException(status, reason)

    scheduler = Kubernetes({})
    vars(scheduler)["_connection"] = Api(), "default"
    submitted = scheduler.submit("muster-u-kubernetes-1-a1", ORDER, SPEC)
    if kind is None:
        asyncio.run(submitted)
        return
    with pytest.raises(NotStarted, match=f"Kubernetes answers {status}: as said") as found:
        asyncio.run(submitted)
    assert found.type is kind
