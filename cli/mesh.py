"""``muster mesh``: the secret of a household, who leads it, and what stands between machines."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from cli.checks.doctor import Finding, Verdict, finding_lines
from cli.config import origin_of, read_config_file
from cli.errors import ExitCode
from cli.node import LISTEN_SECONDS, ask_node, joining
from cli.output import Column, Group, Output, columns, facts, output_option, say, show
from cli.services.record import service_settings
from muster.contracts.settings.paths import DataDir
from muster.host.private import make_private
from muster.mesh.secret import KEY_VARIABLE, keep_secret, make_secret

if TYPE_CHECKING:
    from muster.mesh.group import Mesh
    from muster.mesh.node import Status

WATCH_SECONDS: Final = 1.0
EVENT_LINES: Final = 5

_PROCESSES: Final[Mapping[str, Column]] = {
    "HOST": "host",
    "NODE": "node_id",
    "PROCESS": "process_id",
    "ADDRESS": lambda row: ":".join(map(str, row["address"])),
    "GROUP": "group",
    "SIZE": "size",
}


_NO_NODE: Final = "no node answers, so there is no master: start muster node on each machine"
_ALONE: Final = (
    "no other process answers: start muster node on another machine, or see what is wrong: muster "
    "mesh doctor"
)


def _latency(row: Mapping[str, Any]) -> str | None:
    return None if row["latency_ms"] is None else f"{row['latency_ms']:.1f} ms"


_PEERS: Final[Mapping[str, Column]] = {
    **_PROCESSES,
    "STATE": "condition",
    "ROUND TRIP": _latency,
    "UPTIME": lambda row: f"{row['uptime_ratio']:.1%}",
    "ROWS": lambda row: "all" if row["has_rows"] else None,
}


_LINKS: Final[Mapping[str, Column]] = {
    "BETWEEN": "between",
    "SPEED": lambda row: f"{row['bytes_per_second'] / 1e6:.1f} MB/s",
}


@click.group(cls=Group, invoke_without_command=True)
@click.option("--for", "seconds", type=click.FloatRange(0), metavar="SECONDS", help="Default: 3.")
@click.option("-w", "--watch", is_flag=True, help="Show it anew every second, until Ctrl-C.")
@output_option
@click.pass_context
def mesh(ctx: click.Context, *, seconds: float | None, watch: bool, output: Output) -> None:
    """Show who leads this household, and its nodes and links.

    It asks the node of this machine, else any other one. Without a node it listens for 3 seconds,
    and lists the processes that answer; it joins no group. GROUP is what a process waits for, or is
    a member of. See docs/home.md.
    """
    if ctx.invoked_subcommand is not None:
        return
    if watch and output is not Output.TABLE:
        raise click.UsageError("--watch shows tables: leave out --watch or --output")
    with joining() as own:
        status = ask_node(own, LISTEN_SECONDS if seconds is None else seconds)
        if watch:
            _watch(own, status)
        elif status is None:
            _show_processes(own, output)
        else:
            peers = [peer.process_id for peer in status.peers]
            show(output, msgspec.to_builtins(status), _lines(status), peers)
            if status.node_id != own.network.node_id:
                say("no node answers on this machine: start one with muster node")


def _show_processes(own: Mesh, output: Output) -> None:
    found = sorted(own.network.hellos(), key=lambda one: (one[0].node_id, one[0].process_id))
    rows: list[dict[str, Any]] = [
        msgspec.to_builtins(member) | {"group": hello.group, "size": hello.size}
        for member, hello in found
    ]
    show(output, rows, columns(rows, _PROCESSES), (row["process_id"] for row in rows))
    for warning in list(own.network.warnings):
        say(warning)
    say(_NO_NODE if rows else _ALONE)


def _lines(status: Status) -> Iterator[str]:
    """Yield what a node knows, for people."""
    hosts = {peer.node_id: peer.host for peer in status.peers if peer.machine}
    hosts[status.node_id] = status.host
    counts = Counter(hosts.values())
    full = {node_id: f"{host} ({node_id})" for node_id, host in hosts.items()}
    names = {each: host if counts[host] == 1 else full[each] for each, host in hosts.items()}
    leads = "none"
    if status.master:
        leads = f"{full.get(status.master, status.master)}, epoch {status.epoch}"
    around = [*status.ring, status.ring[0]] if len(status.ring) > 1 else status.ring
    may_not = "" if status.may_lead else ", may not lead"
    yield from facts(
        [
            ("master", leads),
            ("asked", f"{full[status.node_id]}, {status.state}{may_not}"),
            ("ring", " → ".join(names.get(each, each) for each in around)),
        ]
    )
    peers = [msgspec.to_builtins(peer) for peer in status.peers]
    links = [
        msgspec.to_builtins(link) | {"between": " - ".join(names[each] for each in link.nodes)}
        for link in sorted(status.links, key=lambda one: one.nodes)
        if {*link.nodes} <= names.keys()  # else it was measured before that node went
    ]
    for rows, shown in ((peers, _PEERS), (links, _LINKS)):
        if rows:
            yield from ("", *columns(rows, shown))
    yield ""
    for event in status.events[-EVENT_LINES:]:
        yield f"{datetime.fromtimestamp(event.at, UTC):%H:%M:%S} UTC  {event.text}"
    yield from status.warnings
    if not peers:
        yield _ALONE


def _watch(own: Mesh, status: Status | None) -> None:
    from rich.live import Live  # noqa: PLC0415  60 ms
    from rich.text import Text  # noqa: PLC0415  as above

    with suppress(KeyboardInterrupt), Live(screen=True, auto_refresh=False) as live:
        while True:
            lines = _lines(status) if status else [_NO_NODE]
            live.update(Text("\n".join(lines), no_wrap=True), refresh=True)
            time.sleep(WATCH_SECONDS)
            status = ask_node(own, LISTEN_SECONDS)


@mesh.command()
def secret() -> None:
    """Make the secret of this household; it is printed only once."""
    text = make_secret()
    _keep(text).founder_mark.touch(mode=0o600)
    click.echo(text)
    say("on each other machine type it after: muster mesh join")


@mesh.command()
def join() -> None:
    """Keep the secret of this household, typed or from standard input."""
    if sys.stdin.isatty():
        text = click.prompt("the secret (it is not shown)", hide_input=True, err=True)
    else:
        text = sys.stdin.buffer.read().decode(errors="replace")
    _keep(text)
    say("next: muster node; to see which other processes answer: muster mesh")


@mesh.command()
@click.argument("names", nargs=-1, metavar="[NAME or ADDRESS]...", help="Default: all announced.")
@output_option
def doctor(*, names: tuple[str, ...], output: Output) -> None:
    """Check what stands between this machine and others.

    A name is that of a host, a node or a process. Exit code 1 if there is a problem.
    """
    with joining() as own:
        time.sleep(LISTEN_SECONDS)
        from muster.mesh.doctor import examine  # noqa: PLC0415  needs zeroconf

        checks = asyncio.run(examine(own.network, [*own.announcer.heard.values()], names))
        status = ask_node(own, 0)
    findings = [*findings_of_node(status)] if status else []
    for about, seen, fix, is_warning in checks:
        bad = Verdict.WARNING if is_warning else Verdict.PROBLEM
        findings.append(Finding(about, bad if fix else Verdict.OK, seen, fix))
    faulty = [one.about for one in findings if one.fix]
    show(output, msgspec.to_builtins(findings), finding_lines(findings), faulty)
    if any(one.verdict is Verdict.PROBLEM for one in findings):
        sys.exit(ExitCode.FAILED)


def findings_of_node(status: Status) -> Iterator[Finding]:
    """Yield what a node has found by itself, as a disk that is full."""
    for warning in status.warnings:
        problem, _, fix = warning.rpartition(": ")
        yield Finding(f"{status.host} node", Verdict.PROBLEM, problem or fix, fix)


def _keep(text: str) -> DataDir:
    files = DataDir(service_settings().data_dir)
    make_private(files.root)
    keep_secret(files.cluster_key, text)
    say(f"kept in {files.cluster_key}")
    if origin_of("MUSTER_DATA_DIR", os.environ, read_config_file(os.environ)) == "file":
        say(f"scripts do not read your config.toml: export MUSTER_DATA_DIR={files.root}")
    if os.environ.get(KEY_VARIABLE):
        say(f"{KEY_VARIABLE} is set, and used instead of it")
    return files
