"""Test hosts: namespaces with a network, processes, a name, a boot and a disk of their own.

A host is a pid, UTS, mount and (with a network) network namespace of this machine, below a user
namespace if the caller is not root. Nothing of it has a name outside, so the kernel removes it with
its first process (`host_init`), which ends when the process that made the host ends, however.
"""

import json
import os
import shlex
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO

import pytest

from muster.host.processes import descendants, identify, is_stopped
from tests.support.installation import DEADLINE_SECONDS, end_of

HERE = Path(__file__).parent
USER = () if os.geteuid() == 0 else ("--user", "--map-root-user")
SEPARATE = ("--pid", "--fork", "--kill-child", "--mount-proc", "--uts", "--mount")
NAMESPACES = ("unshare", *USER, *SEPARATE, "--")
SETTLE_SECONDS = 0.001


@cache
def refusal(*, network: bool = True) -> str:
    """Return why this machine lets us make no hosts, "" if it does."""
    script = "ip link add switch type bridge && tc qdisc add dev switch clsact"
    net = ("--net",) if network else ()
    words = ["unshare", *USER, *net, *SEPARATE, "--", "sh", "-c", script if network else ":"]
    tried = subprocess.run(words, check=False, capture_output=True, text=True)
    return tried.stderr.strip() if tried.returncode else ""


def needs_hosts(*, network: bool = True) -> pytest.MarkDecorator:
    reason = refusal(network=network)
    return pytest.mark.skipif(bool(reason), reason=f"no test hosts can be made here: {reason}")


class Network:
    """A bridge in a namespace of its own, and what it does not deliver."""

    def __init__(self, rate: str | None = None, *, is_hub: bool = False) -> None:
        """`rate` is that of each host in both directions, as `tc` writes it: ``1gbit``."""
        self._rate = rate
        self._cuts: set[tuple[int, int]] = set()
        self._holder = subprocess.Popen(
            ["unshare", *USER, "--net", "--", "sh", "-c", "echo; exec cat"],  # noqa: S607
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._holder.stdout is not None
        self._holder.stdout.readline()  # it has entered its namespaces
        bridge = "link add switch type bridge mcast_snooping 0"  # no querier here
        bridge += " ageing_time 0" * is_hub  # it forgets at once where each is
        self._do("ip", bridge, "link set switch up", "link set lo up")

    def close(self) -> None:
        self._holder.communicate()

    def entry(self) -> list[str]:
        """Return the words before a command that make it the first process of a host."""
        user = _entering(self._holder.pid) if USER else []
        return [*user, "unshare", "--net", *SEPARATE, "--"]

    def plug(self, number: int, pid: int) -> None:
        port = f"port{number}"
        # The same after a boot: neighbours remember it.
        mac = f"02:00:00:00:00:{number + 1:02x}"
        pair = f"link add {port} type veth peer name eth0 address {mac} netns {pid}"
        self._do("ip", pair, f"link set {port} master switch up")
        inside = ["link set lo up", f"address add {address(number)}/24 dev eth0"]
        inside += ["link set eth0 addrgenmode none"]  # no IPv6, which a cut would let pass
        inside += ["link set eth0 up", "route add 224.0.0.0/4 dev eth0"]
        self._do("ip", *inside, pid=pid)
        self._do("tc", f"qdisc add dev {port} clsact")
        self._filter("add", [cut for cut in self._cuts if cut[1] == number])
        if self._rate is not None:
            limit = f"root tbf rate {self._rate} burst 128kb latency 50ms"
            self._do("tc", f"qdisc add dev {port} {limit}")
            self._do("tc", f"qdisc add dev eth0 {limit}", pid=pid)

    def unplug(self, number: int) -> None:
        self._do("ip", f"link del port{number}")

    def cut(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Deliver nothing from the first to the second of each pair."""
        new = set(pairs) - self._cuts
        self._filter("add", new)
        self._cuts |= new

    def heal(self, number: int) -> None:
        healed = {cut for cut in self._cuts if number in cut}
        self._filter("del", healed)
        self._cuts -= healed

    def _filter(self, verb: str, cuts: Iterable[tuple[int, int]]) -> None:
        # Not every kernel has the action "drop". Redirected to the bridge's own `lo`, a frame for
        # another address is dropped, too.
        lines = []
        for sender, receiver in cuts:
            one = f"filter {verb} dev port{receiver} egress pref {sender + 1} protocol ip u32"
            what = f"match ip src {address(sender)}/32 action mirred egress redirect dev lo"
            lines.append(f"{one} {what if verb == 'add' else ''}")
        self._do("tc", *lines)

    def _do(self, tool: str, *lines: str, pid: int | None = None) -> None:
        """Give lines to `ip` or `tc` in the bridge's namespace, or that of `pid`."""
        words = [*_entering(pid or self._holder.pid), "--net", "--", tool, "-batch", "-"]
        text = "\n".join(lines)
        tried = subprocess.run(words, input=text, check=False, capture_output=True, text=True)
        if tried.returncode:
            raise RuntimeError(f"{tool} failed: {tried.stderr.strip()}; it was given:\n{text}")


def _entering(pid: int) -> list[str]:
    user = ["--user", "--preserve-credentials"] if USER else []
    return ["nsenter", f"--target={pid}", *user]


def address(number: int) -> str:
    return f"10.0.0.{number + 1}"


NAMES = "\n".join(["127.0.0.1 localhost", *(f"{address(n)} host-{n}" for n in range(16))])


class Process:
    """A process of a host, started by its first one; `pid` is that outside."""

    def __init__(self, pid: int, answers: socket.socket) -> None:
        self.pid = pid
        self._answers = answers
        self._code: int | None = None

    def wait(self, timeout_seconds: float | None = DEADLINE_SECONDS) -> int:
        """Return its exit code; if a signal ended it, the negative number."""
        if self._code is None:
            self._answers.settimeout(timeout_seconds)
            self._code = int(self._answers.recv(100) or -signal.SIGKILL)  # empty: a power cut
            self._answers.close()
        return self._code

    def poll(self) -> int | None:
        with suppress(BlockingIOError):
            self.wait(0)
        return self._code

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            signal_all([self.pid], number)


class Host:
    """A machine that sees the files of this one, but for a disk, /dev/shm and identifiers."""

    def __init__(
        self, name: str, root: Path, network: Network | None = None, number: int = 0
    ) -> None:
        """Without `network` it is on that of this process."""
        self.name, self.number, self._network = name, number, network
        self.address = address(number)
        self.log = root / f"{name}.log"
        self.directory = root / name
        """Its disk as seen from outside."""
        self.local = root / "local"
        """Its disk as it sees it: the same path on every host."""
        self.shared = root / "shared"
        """A directory that all hosts see."""
        for directory in (self.directory, self.local, self.shared):
            directory.mkdir(parents=True, exist_ok=True)
        self._machine_id = uuid.uuid4().hex
        self._started: list[Process] = []
        self._holder: subprocess.Popen[bytes] | None = None
        self._pid = 0
        self.power_on()

    # Its processes

    def start(
        self,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        *,
        cwd: Path | None = None,
        stdin: IO[bytes] | None = None,
        output: IO[bytes] | None = None,
    ) -> Process:
        """Start a process; by default it reads nothing and writes to the log of the host."""
        request = {"args": argv, "env": dict(os.environ if env is None else env), "cwd": cwd}
        with self.log.open("ab") as log, Path(os.devnull).open("rb") as nothing:
            answers = self._ask(request, stdin or nothing, output or log, output or log)
        said, [(_, _, credentials)], *_ = answers.recvmsg(4096, 256)
        if said != b"started":
            answers.close()
            raise OSError(f"{self.name} cannot start {argv[0]!r}: {said.decode()}")
        pid, _, _ = struct.unpack("3i", credentials)
        self._started.append(Process(pid, answers))
        return self._started[-1]

    def run(self, *argv: str) -> str:
        """Run a command and return what it printed; it has to succeed."""
        with tempfile.TemporaryFile() as output:
            code = self.start(argv, output=output).wait()
            output.seek(0)
            printed = output.read().decode()
        assert code == 0, f"{self.name}: {shlex.join(argv)} ended with {code}:\n{printed}"
        return printed

    def open_socket(self, kind: int = socket.SOCK_STREAM) -> socket.socket:
        """Return an IPv4 socket for this process that is in the network of the host."""
        with self._ask({"kind": int(kind)}) as answers:
            _, [fd], *_ = socket.recv_fds(answers, 10, 1)
        return socket.socket(fileno=fd)

    @property
    def prefix(self) -> list[str]:
        """The words before a command that run it on the host, as those of ssh do."""
        net = [] if self._network is None else ["--net"]
        return [*_entering(self._pid), *net, "--pid", "--mount", "--uts", "--"]

    @property
    def network_namespace(self) -> Path:
        return Path(f"/proc/{self._pid}/ns/net")

    def processes(self) -> list[int]:
        """Return the pids outside of all that live, but the first one."""
        return [pid for pid in descendants(self._pid) if identify(pid)] if self._pid else []

    # What is done to it

    def power_off(self) -> None:
        """End everything at once; other hosts just receive nothing more."""
        if self._holder is None:
            return
        if self._network is not None and self._pid:
            self._network.unplug(self.number)
        if self._pid:  # it is gone once all others are, and the holder once it is
            os.kill(self._pid, signal.SIGKILL)
        self._holder.wait(DEADLINE_SECONDS)
        self._control.close()
        while self._started:
            self._started.pop().wait()
        self._holder, self._pid = None, 0

    def power_on(self) -> None:
        """Boot: the disk, the machine id and the cuts stay what they were."""
        assert self._holder is None, f"{self.name} is on"
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(DEADLINE_SECONDS)
        entry = NAMESPACES if self._network is None else self._network.entry()
        init = [sys.executable, "-I", str(HERE / "host_init.py"), str(theirs.fileno()), self.name]
        with self.log.open("ab") as log, tempfile.TemporaryDirectory() as made, theirs:
            self._holder = subprocess.Popen(
                [*entry, *init, *self._mounts(Path(made))],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the test, which then ends the hosts
            )
            theirs.close()
            is_up = self._control.recv(10)
        if not is_up:
            self.power_off()
            raise RuntimeError(f"{self.name} does not start:\n{end_of(self.log)}")
        self._pid = descendants(self._holder.pid)[0]
        if self._network is not None:
            self._network.plug(self.number, self._pid)

    def cut(self, *others: "Host", one_way: bool = False) -> None:
        """Lose all that it sends to others and, unless `one_way`, what they send to it."""
        assert self._network is not None
        pairs = [(self.number, other.number) for other in others]
        back = [] if one_way else [pair[::-1] for pair in pairs]
        self._network.cut([*pairs, *back])

    def heal(self) -> None:
        """Deliver again what is for it and from it."""
        assert self._network is not None
        self._network.heal(self.number)

    def freeze(self, first: Iterable[int] = ()) -> None:
        """Stop all processes, `first` before the others, and those started meanwhile."""
        signal_all(first, signal.SIGSTOP)
        while moving := self._moving():
            signal_all(moving, signal.SIGSTOP)
            time.sleep(SETTLE_SECONDS)
            # After vfork a parent cannot stop until its child, which we may have stopped, execs.
            signal_all(descendants(*self._moving()), signal.SIGCONT)

    def thaw(self) -> None:
        signal_all(self.processes(), signal.SIGCONT)

    def _moving(self) -> list[int]:
        return [pid for pid in self.processes() if not is_stopped(pid)]

    def _ask(self, request: Mapping[str, object], *files: IO[bytes]) -> socket.socket:
        answers, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        answers.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, int("args" in request))
        with theirs:
            fds = [theirs.fileno(), *(file.fileno() for file in files)]
            socket.send_fds(self._control, [json.dumps(request, default=str).encode()], fds)
        return answers

    def _mounts(self, made: Path) -> Iterator[str]:
        """Yield what to tell `mount`; files in `made` stay mounted after their removal."""
        contents = {
            Path("/proc/sys/kernel/random/boot_id"): str(uuid.uuid4()),
            Path("/etc/machine-id"): self._machine_id,
        }
        if self._network is not None:
            contents[Path("/etc/hosts")] = NAMES
        for path, content in contents.items():
            (made / path.name).write_text(f"{content}\n")
            if path.exists():
                yield f"--bind {shlex.quote(str(made / path.name))} {path}"
        # What a login runs may lock files of the home directory, and lose power meanwhile.
        if (shell := Path.home() / ".bashrc").exists():
            yield f"--bind /dev/null {shlex.quote(str(shell))}"
        yield shlex.join(["--bind", str(self.directory), str(self.local)])
        yield "-t tmpfs none /dev/shm"
        # Another host has other control groups, and killing one would kill all hosts.
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            fields, _, kind = line.partition(" - ")
            if kind.startswith("cgroup2 "):
                yield f"-t tmpfs -o ro none {fields.split()[4]}"


@contextmanager
def hosts(
    count: int, root: Path, rate: str | None = None, *, is_hub: bool = False
) -> Iterator[list[Host]]:
    """Yield hosts ``host-0``, … with their files below `root`, on a network of their own.

    On a hub each receives what any of them sends.
    Nothing else of them is left afterwards. Raises `RuntimeError` if they cannot be made here.
    """
    if reason := refusal():
        raise RuntimeError(f"no test hosts can be made here: {reason}")
    with ExitStack() as stack:
        network = stack.enter_context(closing(Network(rate, is_hub=is_hub)))
        made: list[Host] = []
        for number in range(count):
            made.append(Host(f"host-{number}", root, network, number))
            stack.callback(made[-1].power_off)
        yield made


def signal_all(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
