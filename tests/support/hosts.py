"""Test hosts: namespaces with a network, processes, a name, a boot and a disk of their own.

A host is a pid, UTS, mount and (with a network) network namespace on this machine, and a user
namespace where the caller is not root. It is made of nothing that has a name outside, so the kernel
removes it with its first process (`host_init.py`), which ends with the process that made it.
"""

import json
import os
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO, Self

import pytest

from muster.host.processes import descendants
from tests.support.installation import DEADLINE_SECONDS, end_of

IS_ROOT = os.geteuid() == 0
HERE = Path(__file__).parent
USER = () if IS_ROOT else ("--user", "--map-root-user")
SEPARATE = ("--pid", "--fork", "--kill-child", "--mount-proc", "--uts", "--mount")
NAMESPACES = ("unshare", *USER, *SEPARATE, "--")
SETTLE_SECONDS = 0.001


@cache
def refusal(*, network: bool = True) -> str:
    """Return why this machine lets us make no test hosts; "" if it does."""
    words = [*NAMESPACES, "true"]
    if network:
        if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
            return f"{' and '.join(missing)} of iproute2 not found"
        script = "ip link add switch type bridge && tc qdisc add dev switch clsact"
        words = ["unshare", *USER, "--net", *SEPARATE, "--", "sh", "-c", script]
    tried = subprocess.run(words, check=False, capture_output=True, text=True)
    return tried.stderr.strip() if tried.returncode else ""


def needs(reason: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(bool(reason), reason=f"no test hosts can be made here: {reason}")


class Network:
    """A bridge in a namespace of its own, and what it does not deliver."""

    def __init__(self, rate: str | None = None) -> None:
        """`rate` is that of each host in both directions, as `tc` writes it: ``1gbit``."""
        self._rate = rate
        self._cuts: set[tuple[int, int]] = set()
        pipe = subprocess.PIPE
        self._holder = subprocess.Popen(
            ["unshare", *USER, "--net", "--", "cat"],  # noqa: S607  wherever it is
            stdin=pipe,
            stdout=pipe,
            start_new_session=True,
        )
        self._holder_says_that_it_is_there()
        self._do("ip", "link add switch type bridge mcast_snooping 0", "link set lo up")
        self._do("ip", "link set switch up")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._holder.communicate()

    def _holder_says_that_it_is_there(self) -> None:
        assert self._holder.stdin is not None
        assert self._holder.stdout is not None
        self._holder.stdin.write(b"\n")
        self._holder.stdin.flush()
        self._holder.stdout.readline()

    @property
    def entry(self) -> list[str]:
        """The words before a command that makes a host of this network."""
        user = [*_entering(self._holder.pid), "--"] if USER else []
        return [*user, "unshare", "--net", *SEPARATE, "--"]

    def plug(self, number: int, pid: int) -> None:
        port = f"port{number}"
        self._do(
            "ip",
            f"link add {port} type veth peer name eth0 netns {pid}",
            f"link set {port} master switch up",
        )
        self._do(
            "ip",
            "link set lo up",
            f"address add {address(number)}/24 dev eth0",
            "link set eth0 addrgenmode none",  # no IPv6, which `cut` would let pass
            "link set eth0 up",
            "route add 224.0.0.0/4 dev eth0",
            pid=pid,
        )
        if self._rate is not None:
            limit = f"root tbf rate {self._rate} burst 128kb latency 50ms"
            self._do("tc", f"qdisc add dev {port} {limit}")
            self._do("tc", f"qdisc add dev eth0 {limit}", pid=pid)
        self._do("tc", f"qdisc add dev {port} clsact")
        self._filter("add", [cut for cut in self._cuts if cut[1] == number])

    def unplug(self, number: int) -> None:
        self._do("ip", f"link del port{number}")

    def cut(self, cuts: Iterable[tuple[int, int]]) -> None:
        """Deliver nothing from the first to the second of each pair; nobody is told."""
        new = set(cuts) - self._cuts
        self._filter("add", new)
        self._cuts |= new

    def heal(self, number: int) -> None:
        healed = {cut for cut in self._cuts if number in cut}
        self._filter("del", healed)
        self._cuts -= healed

    def _filter(self, verb: str, cuts: Iterable[tuple[int, int]]) -> None:
        # Without the "drop" action, which some kernels lack: `lo` of the bridge's namespace takes
        # the frame, which is for the address of another device, and the kernel drops it there.
        where = "match ip src {}/32 action mirred egress redirect dev lo"
        lines = []
        for sender, receiver in cuts:
            one = f"filter {verb} dev port{receiver} egress pref {sender + 1} protocol ip u32"
            lines.append(f"{one} {where.format(address(sender))}" if verb == "add" else one)
        self._do("tc", *lines)

    def _do(self, tool: str, *lines: str, pid: int | None = None) -> None:
        """Run lines of `ip` or `tc` in the bridge's namespace, or that of `pid`."""
        words = [*_entering(pid or self._holder.pid), "--net", "--", tool, "-batch", "-"]
        tried = subprocess.run(
            words, input="\n".join(lines), check=False, capture_output=True, text=True
        )
        if tried.returncode:
            raise RuntimeError(f"{tool} failed: {tried.stderr.strip()}: {'; '.join(lines)}")


def _entering(pid: int) -> list[str]:
    user = ["--user", "--preserve-credentials"] if USER else []
    return ["nsenter", f"--target={pid}", *user]


def address(number: int) -> str:
    return f"10.0.0.{number + 1}"


class Process:
    """A process of a host, a child of its first one."""

    def __init__(self, pid: int, answers: socket.socket) -> None:
        self.pid = pid
        """Outside."""
        self._answers = answers
        self._code: int | None = None

    def wait(self, timeout_seconds: float | None = DEADLINE_SECONDS) -> int:
        """Return its exit code, or the signal as a negative number, as `Popen` does."""
        if self._code is None:
            self._answers.settimeout(timeout_seconds)
            # If the host has gone, nobody answers.
            self._code = int(self._answers.recv(100) or -signal.SIGKILL)
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
    """One machine. The root is its files' as outside, but `local`, which is its own disk."""

    def __init__(
        self, name: str, root: Path, network: Network | None = None, number: int = 0
    ) -> None:
        """Without a network it is in that of this process."""
        self.name = name
        self.number = number
        self.log = root / f"{name}.log"
        self.directory = root / name
        """Its disk as seen from outside."""
        self.local = root / "local"
        """Its disk as it sees it: the same path on every host."""
        self.shared = root / "shared"
        """What all hosts see at this path."""
        self._network = network
        self._machine_id = uuid.uuid4().hex
        for directory in (self.directory, self.local, self.shared):
            directory.mkdir(parents=True, exist_ok=True)
        self._holder: subprocess.Popen[bytes] | None = None
        self._pid = 0
        self._started: list[Process] = []
        self.power_on()

    @property
    def address(self) -> str:
        return address(self.number)

    # Its processes

    def start(
        self,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        *,
        cwd: Path | None = None,
        stdin: int | IO[bytes] | None = None,
        output: int | IO[bytes] | None = None,
    ) -> Process:
        """Start a process there; what it prints goes to the log of the host or to `output`."""
        request = {"args": argv, "env": dict(os.environ if env is None else env), "cwd": cwd}
        with ExitStack() as stack:
            source = stdin or stack.enter_context(Path(os.devnull).open("rb"))
            sink = output or stack.enter_context(self.log.open("ab"))
            fds = [one if isinstance(one, int) else one.fileno() for one in (source, sink, sink)]
            said, pid, _, answers = self._ask(request, fds)
        if said != b"started":
            answers.close()
            raise OSError(f"{self.name} cannot start {argv[0]!r}: {said.decode()}")
        process = Process(pid, answers)
        self._started.append(process)
        return process

    def run(self, *argv: str, timeout_seconds: float = DEADLINE_SECONDS) -> str:
        """Run a command there and return what it printed; it has to end with 0."""
        with tempfile.TemporaryFile() as output:
            code = self.start(argv, output=output).wait(timeout_seconds)
            output.seek(0)
            printed = output.read().decode()
        assert code == 0, f"{self.name}: {shlex.join(argv)} ended with {code}:\n{printed}"
        return printed

    def open_socket(self, kind: int = socket.SOCK_STREAM) -> socket.socket:
        """Return an IPv4 socket in the network of the host, for this process."""
        _, _, fds, answers = self._ask({"kind": int(kind)}, [])
        answers.close()
        return socket.socket(fileno=fds[0])

    def processes(self) -> list[int]:
        """Return the pids outside of all that live, but the first one."""
        return [pid for pid in descendants(self._pid) if is_there(pid)] if self._pid else []

    # What is done to it

    def power_off(self) -> None:
        """End everything there at once; others hear nothing more of it."""
        if self._holder is not None and self._network is not None:
            self._network.unplug(self.number)
        self._end()

    def power_on(self) -> None:
        """Boot: the disk and the cuts are those of before, and nothing else."""
        assert self._holder is None, f"{self.name} is on"
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._control.settimeout(DEADLINE_SECONDS)
        entry = NAMESPACES if self._network is None else self._network.entry
        init = [sys.executable, "-I", str(HERE / "host_init.py")]
        with theirs, self.log.open("ab") as log, tempfile.TemporaryDirectory() as made:
            self._holder = subprocess.Popen(
                [*entry, *init, str(theirs.fileno()), self.name, *self._mounts(Path(made))],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the test, which then ends the hosts
            )
            theirs.close()
            said, self._pid, _ = _receive(self._control)
        if not said:
            self._end()
            raise RuntimeError(f"{self.name} does not start:\n{end_of(self.log)}")
        if self._network is not None:
            self._network.plug(self.number, self._pid)

    def cut(self, *others: "Host", one_way: bool = False) -> None:
        """Lose all that it sends to others and, but for `one_way`, what they send to it."""
        pairs = [(self.number, other.number) for other in others]
        back = [] if one_way else [(receiver, sender) for sender, receiver in pairs]
        self._on_network().cut([*pairs, *back])

    def heal(self) -> None:
        """Deliver again what is to it and from it."""
        self._on_network().heal(self.number)

    def freeze(self, first: Iterable[int] = ()) -> None:
        """Stop all processes, `first` before the others, and those started meanwhile."""
        signal_all(first, signal.SIGSTOP)
        while moving := [pid for pid in self.processes() if not stands_still(pid)]:
            signal_all(moving, signal.SIGSTOP)
            time.sleep(SETTLE_SECONDS)
            # After vfork a parent cannot stop before its child, if that is stopped, calls exec.
            waiting = [pid for pid in moving if state_of(pid) == "D"]
            signal_all(descendants(*waiting), signal.SIGCONT)

    def thaw(self) -> None:
        signal_all(self.processes(), signal.SIGCONT)

    def _end(self) -> None:
        if self._holder is None:
            return
        if self._pid:  # it is gone once all the others are, and the holder once it is
            os.kill(self._pid, signal.SIGKILL)
        self._holder.wait(DEADLINE_SECONDS)
        self._control.close()
        while self._started:
            self._started.pop().wait()
        self._holder, self._pid = None, 0

    def _on_network(self) -> Network:
        assert self._network is not None, f"{self.name} shares the network of this process"
        return self._network

    def _ask(
        self, request: Mapping[str, object], fds: Sequence[int]
    ) -> tuple[bytes, int, list[int], socket.socket]:
        answers, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        answers.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        with theirs:
            message = json.dumps(request, default=str).encode()
            socket.send_fds(self._control, [message], [theirs.fileno(), *fds])
        return *_receive(answers), answers

    def _mounts(self, made: Path) -> Iterator[str]:
        """Yield what `mount` is told; what is mounted from `made` may be removed afterwards."""
        (made / "boot_id").write_text(f"{uuid.uuid4()}\n")
        (made / "machine-id").write_text(f"{self._machine_id}\n")
        bound = {
            made / "boot_id": Path("/proc/sys/kernel/random/boot_id"),
            made / "machine-id": Path("/etc/machine-id"),
            self.directory: self.local,
        }
        for source, target in bound.items():
            if target.exists():
                yield shlex.join(["--bind", str(source), str(target)])
        yield "-t tmpfs none /dev/shm"
        # Another host has other control groups, and killing one would kill all hosts.
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            fields, _, kind = line.partition(" - ")
            if kind.startswith("cgroup2 "):
                yield f"-t tmpfs -o ro none {fields.split()[4]}"


@contextmanager
def hosts(count: int, root: Path, rate: str | None = None) -> Iterator[list[Host]]:
    """Yield hosts ``host-0``, … on a network of their own; nothing of them is left afterwards.

    Their disks, logs and shared directory are below `root`. Raises `RuntimeError` with the reason
    if this machine lets us make none.
    """
    if reason := refusal():
        raise RuntimeError(f"no test hosts can be made here: {reason}")
    with ExitStack() as stack:
        network = stack.enter_context(Network(rate))
        made = []
        for number in range(count):
            host = Host(f"host-{number}", root, network, number)
            stack.callback(host.power_off)
            made.append(host)
        yield made


def _receive(answers: socket.socket) -> tuple[bytes, int, list[int]]:
    """Return a datagram, the pid of its credentials, and the descriptors."""
    said, ancillary, _, _ = answers.recvmsg(4096, 256)
    pid = 0
    fds: list[int] = []
    for _, kind, data in ancillary:
        if kind == socket.SCM_CREDENTIALS:
            pid = struct.unpack("3i", data)[0]
        else:
            fds += struct.unpack(f"{len(data) // 4}i", data)
    return said, pid, fds


def signal_all(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def stands_still(pid: int) -> bool:
    """Whether a process is stopped, or over."""
    return state_of(pid) in {"T", "Z", "X", ""}


def is_there(pid: int) -> bool:
    return state_of(pid) not in {"Z", "X", ""}


def state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    except OSError:
        return ""
