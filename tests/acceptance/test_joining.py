"""A machine of the cluster file that asks to join a job gets a rank."""

from pathlib import Path

from tests.support.clusters import cluster, needs_cluster
from tests.support.installation import await_value


@needs_cluster()
def test_a_machine_that_asks_to_join_trains_along(tmp_path: Path) -> None:
    with cluster(tmp_path, count=4) as installation:
        *_, last = installation.machines
        job_id = installation.submit(
            mode="synchronous", world_size=2, max_workers=3, epochs=1000, sleep_sec=0.05
        )
        installation.wait_until(job_id, lambda seen: seen["step"] > 3)
        path = f"/jobs/{job_id}/workers"
        answer = installation.request("POST", path, json={"node": last.name})
        assert (answer.status_code, answer.json()["world_size"]) == (202, 3), answer.text

        def joined() -> dict[str, object] | None:
            pool = installation.request("GET", path).json()
            return pool if pool["active"] == 3 and not pool["is_changing"] else None

        pool = await_value(joined, lambda: installation.describe(job_id))
        newcomer = pool["workers"][2]
        assert (newcomer["rank"], newcomer["state"], newcomer["node"]) == (2, "active", last.name)
        assert (newcomer["backend"], newcomer["gpu_count"]) == ("cpu", 0)
        assert installation.process_tags(last), "its processes are there"
        full = installation.request("POST", path, json={"node": last.name})
        assert full.status_code == 409, full.text
