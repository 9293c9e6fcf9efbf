"""The four lines, in processes of one machine with a network of its own."""

import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from muster.mesh.secret import make_secret, shared_key
from tests.support.homes import HomeScript, Household, ask_all, household, meet
from tests.support.hosts import Host, hosts, needs_hosts
from tests.support.installation import await_value

pytestmark = needs_hosts()

SOON_SECONDS = 1.0
ARRAY_BYTES = 4000
PORT_RANGE = "/proc/sys/net/ipv4/ip_local_port_range"


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    with hosts(1, tmp_path_factory.mktemp("hosts")) as (made,):
        yield made


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Household]:
    with household(tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def alone(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HomeScript]:
    with household(tmp_path_factory.mktemp("alone")) as made:
        yield made.scripts(1, host)[0]


def test_a_killed_process_is_gone_and_the_others_meet_anew(host: Host, home: Household) -> None:
    first, second, third = home.scripts(3, host, host, host)
    group = meet([first, second, third])[0]
    assert [said["sum"] for said in ask_all([first, second, third], "reduce")] == [3.0] * 3
    name = group["names"][group["rank"]]
    second.ask("reduce")
    first.call("fork")  # it keeps what its parent had open
    first.kill()
    for said in second.answer(), third.call("reduce"):
        assert (said["error"], said["name"]) == ("PeerGone", name)
    (newcomer,) = home.scripts(1, host)
    newcomer.ask("discover", peers=2)
    for script in second, third:
        await_value(lambda it=script: len(it.call("linked")["linked"]) == 2, str)  # type: ignore[misc]
    anew = [*ask_all([second, third], "meet"), newcomer.answer()]
    assert [len(said.get("members", [])) for said in anew] == [3] * 3, anew
    assert anew[0]["members"] == anew[1]["members"] == anew[2]["members"]


def test_counters_tell_of_network_and_peers(host: Host, home: Household) -> None:
    first, second = home.scripts(2, host, host)
    meet([first, second], preset="fast")
    ask_all([first, second], "reduce", size=ARRAY_BYTES // 4)
    await_value(lambda: second.call("counters")["network.latency_ms"], str)
    counted = second.call("counters")
    assert counted["network.bytes_sent"] >= ARRAY_BYTES
    assert (counted["peers.linked"], counted["peers.gone"]) == (1, 0)
    first.kill()
    assert second.call("reduce")["error"] == "PeerGone"
    await_value(lambda: second.call("counters")["peers.gone"], str)
    counted = second.call("counters")
    assert (counted["peers.linked"], counted["network.errors"]) == (0, 1)


def test_members_that_close_leave_the_others_alone(host: Host, home: Household) -> None:
    first, second = home.scripts(2, host, host)
    _, group = meet([first, second])
    assert first.call("close")["threads"] == ["MainThread"]
    assert second.call("wait", rank=1 - group["rank"])["error"] == "PeerGone"
    said = second.call("meet", timeout_seconds=SOON_SECONDS)
    assert said["error"] == "Timeout"
    assert "waited 1 s for the others" in said["text"]
    assert second.call("close")["threads"] == ["MainThread"]
    assert "before its close()" in second.call("meet")["text"]


@pytest.mark.parametrize("more", [1, 2, 3])
def test_an_interrupted_search_leaves_no_thread(host: Host, home: Household, more: int) -> None:
    (script,) = home.scripts(1, host)
    script.ask("discover", peers=1, timeout_seconds=SOON_SECONDS)
    assert script.answer()["error"] == "Timeout"
    tasks = Path(f"/proc/{script.pid}/task")
    threads = more + len([*tasks.iterdir()])
    script.ask("discover", peers=1)
    await_value(lambda: len([*tasks.iterdir()]) >= threads, lambda: str([*tasks.iterdir()]))
    script.kill(signal.SIGINT)
    said = script.answer()
    assert said["error"] == "KeyboardInterrupt"
    assert said["threads"] == ["MainThread"]


def test_a_list_of_addresses_needs_no_multicast(host: Host, home: Household) -> None:
    scripts = home.scripts(2, host, host)
    places = ["127.0.0.1", "127.0.0.1:52500"]
    for rank, script in enumerate(scripts):
        script.ask("discover", addresses=places, rank=rank)
    answers = [script.answer() for script in scripts]
    assert [answer.get("rank") for answer in answers] == [0, 1], "".join(str(a) for a in answers)
    assert [said["sum"] for said in ask_all(scripts, "reduce")] == [2.0, 2.0]


def test_a_rank_that_calls_too_early_keeps_no_port_from_another(
    host: Host, home: Household
) -> None:
    early, late = home.scripts(2, host, host)
    places, ports = ["127.0.0.1:52501", "127.0.0.1:52502"], host.run("cat", PORT_RANGE)
    host.run("sh", "-c", f"echo 52501 52501 > {PORT_RANGE}")  # so it connects to itself
    early.ask("discover", addresses=places, rank=1)
    table, own = Path(f"/proc/{early.pid}/net/tcp"), " 0100007F:CD15 0100007F:CD15 "
    await_value(lambda: own in table.read_text(), table.read_text)
    host.run("sh", "-c", f"echo {' '.join(ports.split())} > {PORT_RANGE}")
    late.ask("discover", addresses=places, rank=0)
    answers = early.answer(), late.answer()
    assert [answer.get("rank") for answer in answers] == [1, 0], answers


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"addresses": [], "rank": 0}, "at least 2"),
        ({"addresses": ["127.0.0.1", "127.0.0.1:52416"], "rank": 0}, "twice"),
        ({"addresses": ["127.0.0.1", "127.0.0.1:1"], "rank": 2}, "rank 2"),
        ({"addresses": ["127.0.0.1", "127.0.0.1:1"]}, "needs rank="),
        ({"addresses": ["10.9.9.9", "127.0.0.1:1"], "rank": 0}, "not an address of this machine"),
        ({"addresses": ["127.0.0.1"], "peers": 1}, "one of peers=, after= and addresses="),
        ({"peers": 0}, "1 to 63"),
        ({"peers": "1"}, "1 to 63"),
        ({"peers": 1, "preset": "soon"}, "no preset 'soon'"),
    ],
)
def test_options_are_refused(
    alone: HomeScript, options: dict[str, int | str | list[str]], said: str
) -> None:
    assert said in alone.call("discover", **options)["text"]


def test_a_key_that_others_can_read_is_refused(home: Household, tmp_path: Path) -> None:
    key = tmp_path / "cluster.key"
    key.write_text(make_secret())
    key.chmod(0o644)
    script = home.start(MUSTER_CLUSTER_KEY="", MUSTER_DATA_DIR=str(tmp_path))
    script.answer()
    said = script.call("discover", peers=1, timeout_seconds=0.0)
    assert "can be read by others" in said["text"]


def test_an_intruder_reads_nothing_and_stops_nothing(tmp_path: Path, home: Household) -> None:
    record = tmp_path / "record"
    with hosts(4, tmp_path / "hosts", is_hub=True) as (*places, last), ExitStack() as ending:
        command = [sys.executable, "-m", "tests.support.intruder", last.address, str(record)]
        intruder = HomeScript(last, {}, [*command, *(place.address for place in places)])
        ending.callback(intruder.end)
        intruder.answer()
        scripts = home.scripts(3, *places)
        assert {len(said.get("members", [])) for said in meet(scripts)} == {3}
        said = ask_all(scripts, "reduce", size=10_000)
        assert [each.get("sum") for each in said] == [3.0] * 3, said
        assert intruder.call("repeat")["connections"]
        said = ask_all(scripts, "reduce", size=10_000)
        assert [each.get("sum") for each in said] == [3.0] * 3, said
        assert {len(said.get("members", [])) for said in ask_all(scripts, "meet")} == {3}
        listed = {"addresses": [f"{place.address}:52500" for place in places]}
        others = home.scripts(3, *places)
        for rank, script in enumerate(others):
            script.ask("discover", rank=rank, **listed)
        assert [script.answer().get("rank") for script in others] == [0, 1, 2]
        said = ask_all(others, "reduce", size=10_000)
        assert [each.get("sum") for each in said] == [3.0] * 3, said
        intruder.call("repeat")
        heard = record.read_bytes()
    assert heard.count(b"muster\0") > len(scripts)  # hellos are in clear
    key = shared_key({"MUSTER_CLUSTER_KEY": home.secret}, tmp_path)
    numbers = [np.full(8, number, np.float32).tobytes() for number in (1, 2, 3)]
    for secret in home.secret.encode(), key, key.hex().encode(), *numbers:
        assert secret not in heard
