"""Ranks, the agent and coordinators are killed while a series grows."""

import signal

import pytest

from tests.support.installation import Installation, await_value
from tests.support.marks import long

STEPS, SPIKE, NOT_FINITE = 1000, 690, 695

PROGRAM = f"""
import time
import muster

run = muster.join()
run.restore()
while run.steps_done < {STEPS} and not run.should_stop:
    time.sleep(0.005)
    step = run.steps_done + 1
    run.step(loss={{{SPIKE}: 1e6, {NOT_FINITE}: float("nan")}}.get(step, 1 / step))
    if step % 100 == 0:
        run.checkpoint({{"step": step}})
run.checkpoint({{"step": run.steps_done}})
"""


@pytest.mark.parametrize("restart_scope", [long("rank"), "gang"])
def test_a_curve_goes_on_over_kills(installation: Installation, restart_scope: str) -> None:
    def greatest() -> list[float]:
        loss = installation.request("GET", f"/jobs/{job_id}/series").json()["series"]["loss"]
        return [*loss["live"]["greatest"], *loss["abandoned"]["greatest"]]

    gang = {"restart_scope": "gang", "world_size": 2, "keep_last": 100}
    scope = gang if restart_scope == "gang" else {}
    job_id = installation.submit(command=["python", "-c", PROGRAM], **scope)
    installation.wait_until(job_id, lambda seen: seen["step"] > 100)
    installation.coordinator.end(signal.SIGKILL)
    installation.kill(job_id, 0)
    installation.coordinator.start()
    installation.wait_until(job_id, lambda seen: seen["step"] > 700)
    installation.kill(job_id, 0)
    installation.wait_until(job_id, lambda seen: seen["step"] > 800)
    # A coordinator that is killed loses what it has not written yet: about a second of values.
    await_value(lambda: 1e6 in greatest(), lambda: installation.describe(job_id))
    installation.coordinator.end(signal.SIGKILL)
    installation.coordinator.start()
    installation.complete(job_id)
    series = installation.request("GET", f"/jobs/{job_id}/series?points=2048").json()["series"]
    live = series["loss"]["live"]
    assert live["step"] == sorted(set(live["step"]))
    assert live["step"][-1] == STEPS
    assert sum(live["count"]) <= STEPS - 1, "no value is in the curve twice"
    assert 1e6 in greatest(), "the spike is seen"
