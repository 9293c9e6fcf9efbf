"""``muster cluster check`` and ``muster plan`` work on files alone; a sweep asks first."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from click.testing import CliRunner, Result

from cli import cluster
from cli.main import app
from muster import Client

CLUSTER = """\
nodes:
- {name: laptop, host: localhost, cpu_cores: 8, ram_mb: 16000}
- name: gpu-box
  host: 10.0.0.2
  transport: ssh
  gpus: [{uuid: GPU-1, type: RTX 4090, vram_mb: 24564}]
"""
JOB = "world_size: 2\nvram_mb: 12000\n"
PLAN = """\
rank 0: gpu-box (GPU-1)
  laptop   no        it has no GPU
  gpu-box  1.74      20879/12000 MB x 1 / (1 + 0)
rank 1: does not fit
  laptop   no        it has no GPU
  gpu-box  no        GPUs with 12000 MB free: 0 of 1, and a rank needs 1
"""


@pytest.fixture
def muster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Run commands in a directory with a cluster and a job, and no settings."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("MUSTER_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.delenv("MUSTER_CLUSTER", raising=False)
    Path("cluster.yaml").write_text(CLUSTER)
    Path("job.yaml").write_text(JOB)
    return lambda *words: CliRunner().invoke(app, words)


def test_check_shows_the_nodes(muster: Callable[..., Result]) -> None:
    shown = muster("cluster", "check", "cluster.yaml")
    assert (shown.exit_code, shown.stderr) == (0, "")
    assert shown.stdout == (
        "nodes: 2, adapter slots: 2\n"
        "  laptop: localhost, local, CPU-only, slots: 16\n"
        "  gpu-box: 10.0.0.2, ssh, RTX 4090 (20879 of 24564 MB usable), slots: auto\n"
    )
    found = json.loads(muster("cluster", "check", "cluster.yaml", "-o", "json").stdout)
    assert (found["capacity"], [it["name"] for it in found["nodes"]]) == (2, ["laptop", "gpu-box"])


def test_check_adds_what_the_services_know_of_the_hosts(
    muster: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    host = {
        "host": "gpu-box",
        "address": "10.0.0.2",
        "transport": "ssh",
        "slots": None,
        "slots_in_use": 0,
        "jobs": [],
        "gpu_count": 1,
        "usable_vram_mb": 1,
        "agents": {},
        "facts": None,
        "seen_at": None,
        "shared_dir": None,
    }
    body = {"hosts": [{**host, "problem": "it wants a password"}]}
    transport = httpx.MockTransport(lambda _: httpx.Response(200, json=body))
    client = Client("http://api", transport=transport)
    monkeypatch.setattr(cluster, "connected", lambda: nullcontext(client))
    monkeypatch.setattr(cluster, "find_own_services", lambda: "running")
    shown = muster("cluster", "check", "cluster.yaml")
    assert shown.stdout.endswith("slots: auto\ngpu-box: it wants a password\n")
    found = json.loads(muster("cluster", "check", "cluster.yaml", "-o", "json").stdout)
    assert found["problems"] == ["gpu-box: it wants a password"]


def test_plan_says_of_each_node_why(muster: Callable[..., Result]) -> None:
    shown = muster("plan", "job.yaml", "--cluster", "cluster.yaml")
    assert (shown.exit_code, shown.stdout, shown.stderr) == (1, PLAN, "")
    found = json.loads(muster("plan", "job.yaml", "--cluster", "cluster.yaml", "-o", "json").stdout)
    first, second = found["ranks"]
    assert (first["chosen"]["node"], first["chosen"]["gpus"]) == ("gpu-box", ["GPU-1"])
    assert (second["chosen"], len(second["verdicts"])) == (None, 2)


def test_plan_takes_the_cluster_of_the_settings(
    muster: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = muster("plan", "job.yaml")
    assert (missing.exit_code, "Missing option '--cluster'" in missing.stderr) == (2, True)
    Path("muster").mkdir()
    Path("muster/config.toml").write_text(f'MUSTER_CLUSTER = "{Path.cwd()}/cluster.yaml"\n')
    Path("job.yaml").write_text("{world_size: 1, vram_mb: 1}")
    # The command puts the settings of the file into the environment: restored after the test.
    monkeypatch.setenv("MUSTER_CLUSTER", "")
    monkeypatch.delenv("MUSTER_CLUSTER")
    assert muster("plan", "job.yaml", "-o", "name").stdout == "gpu-box\n"


@pytest.mark.parametrize(
    ("mflop", "line"),
    [
        ("100", "worth a GPU: no, 1 us of computing <= 5 x 40 us of transfer"),
        ("1000000", "worth a GPU: yes, 10000 us of computing > 5 x 40 us of transfer"),
    ],
)
def test_plan_says_whether_a_gpu_pays(mflop: str, line: str, muster: Callable[..., Result]) -> None:
    words = ["plan", "job.yaml", "--cluster", "cluster.yaml", "--transfer-mb", "1"]
    assert muster(*words, "--compute-mflop", mflop).stdout == f"{PLAN}{line}\n"
    refused = muster(*words)
    assert refused.exit_code == 2
    assert "Give both of --transfer-mb and --compute-mflop" in refused.stderr


@pytest.mark.parametrize(
    ("job", "sentence"),
    [
        ("vram: 1\n", "job.yaml:1:1: vram: there is no such field (did you mean 'vram_mb'?)\n"),
        ("vram_mb: 0\n", "job.yaml:1:1: vram_mb: 0 is not between 1 and 1073741824\n"),
        ("hosts: [gpu]\n", "muster: there is no node 'gpu': use one of laptop, gpu-box\n"),
        ("hosts: []\n", "muster: hosts: names no node: leave it out to allow all\n"),
        ("hosts: [-x]\n", "job.yaml:1:9: hosts.0: use up to 63 letters, "),
        ("{", "muster: job.yaml:1:2: "),
    ],
)
def test_invalid_job_is_refused_in_one_sentence(
    job: str, sentence: str, muster: Callable[..., Result]
) -> None:
    Path("job.yaml").write_text(job)
    refused = muster("plan", "job.yaml", "--cluster", "cluster.yaml")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert refused.stderr.startswith(sentence)
    assert refused.stderr.count("\n") == 1


def test_invalid_cluster_is_refused_in_one_sentence(muster: Callable[..., Result]) -> None:
    Path("cluster.yaml").write_text(CLUSTER.replace("24564", "0"))
    for words in (
        ["cluster", "check", "cluster.yaml"],
        ["plan", "job.yaml", "--cluster", "cluster.yaml"],
    ):
        refused = muster(*words)
        assert (refused.exit_code, refused.stdout) == (2, "")
        assert refused.stderr == (
            "muster: cluster.yaml:6: node gpu-box: GPU GPU-1 has vram_mb 0: "
            "write the MB that nvidia-smi shows\n"
        )


LEFT = {"name": "muster-u-slurm-1-a1", "state": "PENDING", "job_id": None}


@pytest.mark.parametrize(
    ("words", "is_terminal", "reply", "cancelled"),
    [
        ([], True, "y", [LEFT["name"]]),
        ([], True, "n", None),
        ([], False, "y", None),
        (["-o", "json"], True, "y", None),
        (["--yes"], False, "", [LEFT["name"]]),
    ],
)
def test_a_sweep_cancels_only_what_was_agreed(
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    is_terminal: bool,  # noqa: FBT001  a table's column
    reply: str,
    cancelled: list[str] | None,
) -> None:
    requests: list[list[str]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "POST":
            requests.append(json.loads(request.content)["cancel"])
        left = [] if requests and requests[-1] else [LEFT]
        sweep = {"number": len(requests), "cancel": [], "leftovers": left}
        slurm = {"engine": "slurm", "is_allowed": True, "problem": None, "seen_at": None}
        engines = [{**slurm, "agents": {}, "sweep": sweep}]
        body = sweep if request.method == "POST" else {"engines": engines}
        return httpx.Response(200, json=body)

    client = Client("http://api", transport=httpx.MockTransport(answer))
    monkeypatch.setattr(cluster, "connected", lambda: nullcontext(client))
    stdin = SimpleNamespace(isatty=lambda: is_terminal)
    monkeypatch.setattr(cluster, "sys", SimpleNamespace(stdin=stdin))
    shown = CliRunner().invoke(app, ["engines", "sweep", *words], input=reply)
    assert (shown.exit_code, LEFT["name"] in shown.stdout) == (0, True), shown
    assert requests == [[], *([] if cancelled is None else [cancelled])]
