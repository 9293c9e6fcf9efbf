"""``muster doctor``: check machine, settings and places, and say what to do about each problem."""

import errno
import ipaddress
import os
import platform
import resource
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import click
import msgspec
import psutil

from cli.config import with_origin
from cli.errors import ExitCode
from cli.output import Output, output_option, plural, show
from cli.services.record import read_record, service_settings
from muster.contracts.errors import InvalidEnvironment, MusterError
from muster.contracts.settings.paths import DataDir, has_few_files_left, is_nearly_full, size_text
from muster.contracts.settings.services import AccessSettings, S3Settings, ServiceSettings
from muster.contracts.token import WAY_TO_ADMIN
from muster.host.containment import cgroup_of
from muster.host.extras import install_command, missing_server_packages
from muster.host.files import existing
from muster.host.gpus import visible_gpus
from muster.host.limits import memory_limits
from muster.host.ports import AddressNotLocal, PortUnavailable, is_port_free
from muster.host.processes import counts_waits, module_command
from muster.runtime.secrets import SecretStore
from muster.runtime.stderr_messages import print_stderr

DESCRIPTORS_MIN: Final = 1024
DESCRIPTORS_WANTED: Final = 4096
"""An agent holds a few for each rank, the API one for each stream and each log that is read."""

SHARED_MEMORY: Final = "/dev/shm"  # noqa: S108  only looked at
SHARED_MEMORY_WANTED_BYTES: Final = 1 << 30
"""Containers get 64 MiB by default, too little for the workers of a torch DataLoader."""

MEMORY_WANTED_BYTES: Final = 1 << 30

PROBE_BYTES: Final = 1 << 16
"""More than the rest of a block that is already allocated."""

REMOTE_FILE_SYSTEMS: Final = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "afs", "lustre"}
)
"""SQLite cannot rely on their locks."""


class Verdict(StrEnum):
    OK = "ok"
    WARNING = "warning"
    """It works, with a disadvantage."""
    PROBLEM = "problem"
    """Part of Muster does not work."""


class Finding(msgspec.Struct, frozen=True):
    """The result of one check; `fix` says what to do about a warning or a problem."""

    about: str
    verdict: Verdict
    seen: str
    fix: str = ""


class StartReport(msgspec.Struct, frozen=True):
    """The output of ``python -P -m api --check``."""

    problems: list[dict[str, str]]
    """check, what, why, next; `why` and `next` may be empty."""
    address: str | None
    database: dict[str, Any] | None
    """kind, revision (None: no tables yet), expected_revision, and what the database says of
    itself: see `database.engine.Database.facts`; None if it cannot be read."""
    has_admin_token: bool
    stores: list[dict[str, str]] = []  # for `_finding`; only with ``--store``


class CannotStart(MusterError):
    """The API would not start with these settings."""


@click.command()
@output_option
def doctor(*, output: Output) -> None:
    """Check this installation and suggest repairs.

    Exit code 1 if there is a problem. Nothing is changed, and services need not run.
    """
    findings = list(_findings(os.environ))
    names = [finding.about for finding in findings if finding.verdict is not Verdict.OK]
    show(output, msgspec.to_builtins(findings), finding_lines(findings), names)
    count = Counter(finding.verdict for finding in findings)
    problems, warnings = count[Verdict.PROBLEM], count[Verdict.WARNING]
    click.echo(f"{plural(problems, 'problem')}, {plural(warnings, 'warning')}", err=True)
    click.echo("to check a script with muster.torch: muster check train.py", err=True)
    sys.exit(ExitCode.FAILED if problems else ExitCode.OK)


def require_startable(environ: Mapping[str, str]) -> None:
    """Raise `CannotStart` if the API would refuse to start; changes nothing."""
    report = start_report(environ)
    if report.problems:
        pairs = ([_what(problem), problem["next"]] for problem in report.problems)
        raise CannotStart("\n".join("; ".join(filter(None, pair)) for pair in pairs))
    if AccessSettings.read(environ).require_token and not report.has_admin_token:
        print_stderr(
            f"muster: MUSTER_REQUIRE_TOKEN is set, but no admin token is valid: {WAY_TO_ADMIN}"
        )


def start_report(environ: Mapping[str, str], *options: str) -> StartReport:
    """Ask the API whether it would start; raises `CannotStart` if it cannot say."""
    # A process of its own: the CLI itself knows neither database nor web framework.
    asked = subprocess.run(
        module_command("api", "--check", *options),
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        check=False,
    )
    try:
        return msgspec.json.decode(asked.stdout, type=StartReport)
    except msgspec.MsgspecError as error:
        raise CannotStart(f"python -P -m muster api --check failed: {error}") from error


def _findings(environ: Mapping[str, str]) -> Iterator[Finding]:
    yield from _check_machine()
    try:
        settings = service_settings()
        access, shards = AccessSettings.read(environ), S3Settings.read(environ)
    except InvalidEnvironment as error:
        fix = "docs/reference/configuration.md explains each"
        yield _finding("settings", str(with_origin(error, environ)), problem=fix)
        return
    yield _finding("settings", "all can be read; see: muster config show")
    yield from _check_places(settings)
    yield _check_port(settings, environ)
    if missing := missing_server_packages():
        seen = f"not installed: {', '.join(missing)}"
        yield _finding("start", seen, warning=f"for up, run and demo: {install_command('server')}")
        return
    try:
        report = start_report(environ, "--store")
    except CannotStart as error:
        yield _finding("start", str(error), problem="see the error above")
        return
    yield _check_database(report)
    yield _check_access(report, access)
    for store in report.stores:
        yield _finding("store", **store)
    if report.stores:
        cache = _check_writable("cache", shards.cache_dir, "MUSTER_CACHE_DIR")
        limit = f", at most {size_text(shards.cache_bytes)}"
        yield msgspec.structs.replace(cache, seen=cache.seen + limit)


def _check_machine() -> Iterator[Finding]:
    is_enough = hasattr(os, "pidfd_open") and Path("/proc/self/stat").exists()
    fix = "run it on Linux 5.3 or newer, with /proc mounted; a container is fine"
    release = f"{platform.system()} {platform.release()}"
    yield _finding("kernel", release, problem="" if is_enough else fix)
    yield _finding("python", f"{platform.python_version()} at {sys.executable}")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fix = f"for jobs of many ranks raise the hard limit to {DESCRIPTORS_WANTED} (nofile)"
    yield _finding(
        "descriptors",
        f"{soft} open files, {hard} at most",
        problem=f"ulimit -n {DESCRIPTORS_WANTED}" if soft < DESCRIPTORS_MIN else "",
        warning=fix if hard < DESCRIPTORS_WANTED else "",
    )
    left = [left_bytes for _, left_bytes in memory_limits()]
    available = min([psutil.virtual_memory().available, *left])
    fix = "a rank takes 50 MiB and its model: run fewer at once"
    is_enough = available >= MEMORY_WANTED_BYTES
    yield _finding("memory", f"{size_text(available)} available", warning="" if is_enough else fix)
    size = shutil.disk_usage(SHARED_MEMORY).total if Path(SHARED_MEMORY).is_dir() else 0
    fix = "torch needs a tmpfs there; start a container with --shm-size=1g"
    is_enough = size >= SHARED_MEMORY_WANTED_BYTES
    yield _finding(SHARED_MEMORY, f"{size_text(size)}", warning="" if is_enough else fix)
    cgroup = cgroup_of("")
    has_cgroups = cgroup is not None and os.access(cgroup.parent, os.W_OK)
    fix = "run Muster under systemd (systemd-run --user --scope -p Delegate=yes), or as root"
    none = "none can be created: processes that a rank leaves behind are found by their tag"
    seen = "each rank gets its own" if has_cgroups else none
    yield _finding("cgroups", seen, warning="" if has_cgroups else fix)
    fix = "a rank that gets no processor for longer than heartbeat_timeout is taken for dead"
    seen = "counted" if counts_waits() else "not counted: the kernel has no schedstat"
    yield _finding("processor waits", seen, warning="" if counts_waits() else fix)
    yield _finding("GPUs", f"{visible_gpus(os.environ)} visible")


def _check_places(settings: ServiceSettings) -> Iterator[Finding]:
    yield _check_writable("data", settings.data_dir, "MUSTER_DATA_DIR")
    present = existing(settings.data_dir)
    parts = psutil.disk_partitions(all=True)
    mounts = [mount for mount in parts if present.resolve().is_relative_to(mount.mountpoint)]
    kind = max(mounts, key=lambda mount: len(mount.mountpoint)).fstype if mounts else "unknown"
    fix = "SQLite needs a local disk: set MUSTER_DATA_DIR"
    yield _finding("disk", kind, warning=fix if kind in REMOTE_FILE_SYSTEMS else "")
    usage, files = shutil.disk_usage(present), os.statvfs(present)
    seen = f"{size_text(usage.free)} of {size_text(usage.total)} are free"
    is_short = is_nearly_full(usage.free, usage.total)
    if has_few_files_left(files.f_favail, files.f_files):
        seen, is_short = f"{seen}, but only {files.f_favail} more files (inodes)", True
    fix = "make room, or delete old jobs: muster purge --help"
    yield _finding("room", seen, warning=fix if is_short else "")
    if isinstance(settings.checkpoint_dir, Path):
        yield _check_writable("checkpoints", settings.checkpoint_dir, "CHECKPOINT_DIR")
    secrets = SecretStore(DataDir(settings.data_dir).secrets)
    try:
        faults, count = list(secrets.faults()), len(secrets.names())
    except OSError as error:
        faults, count = [str(error)], 0
    fix = "store it again: muster secret set NAME" if faults else ""
    yield _finding("secrets", "; ".join(faults) or f"{count} in {secrets.directory}", problem=fix)


def _check_writable(about: str, directory: Path, variable: str) -> Finding:
    present = existing(directory)
    try:
        # Only writing tells: the disk may be full.
        with tempfile.TemporaryFile(dir=present) as probe:
            probe.write(bytes(PROBE_BYTES))
            probe.flush()
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        fix = "make room there" if is_full else "make it writable for this user"
        seen = f"{directory}: {error.strerror}"
        return _finding(about, seen, problem=f"{fix}, or set {variable}")
    return _finding(about, f"{directory}" + (", to be created" if present != directory else ""))


def _check_port(settings: ServiceSettings, environ: Mapping[str, str]) -> Finding:
    where = f"{settings.host} port {settings.port}"
    record = read_record(DataDir(settings.data_dir))
    if record is not None:
        return _finding("port", f"Muster is up, at {record.url}")
    try:
        if settings.port == 0 or is_port_free(settings.host, settings.port):
            return _finding("port", f"{where} is free")
    except (AddressNotLocal, PortUnavailable) as error:
        return _finding("port", str(error), problem="set MUSTER_HOST and MUSTER_PORT")
    taken = f"{where} is taken"
    if environ.get("MUSTER_PORT"):
        fix = "stop what listens there, or choose another with MUSTER_PORT"
        return _finding("port", taken, problem=fix)
    return _finding("port", taken, warning="muster up takes another, and says which")


def _check_database(report: StartReport) -> Finding:
    for problem in report.problems:
        if problem["check"] == "database":
            fix = "MUSTER_DATABASE_URL names it; unset, it is a file in the data directory"
            return _finding("database", _what(problem), problem=problem["next"] or fix)
    found = report.database
    if found is None:
        return _finding("database", "not checked", warning="correct the other problems first")
    is_current = found["revision"] == found["expected_revision"]
    schema = f"schema {found['revision']}" + ("" if is_current else ": the next start migrates it")
    if found["revision"] is None:
        schema = "its tables to be created"
    if found["kind"] == "sqlite":
        return _finding("database", f"SQLite {sqlite3.sqlite_version}, {schema}")
    most, needed = found["max_connections"], found["connections_needed"]
    fix = f"API and coordinator may need {needed} connections: raise max_connections"
    seen = f"PostgreSQL {found['version']}, {found['encoding']}, {most} connections, {schema}"
    return _finding("database", seen, warning=fix if most < needed else "")


def _check_access(report: StartReport, access: AccessSettings) -> Finding:
    for problem in report.problems:
        if problem["check"] != "database":
            fix = problem["next"] or "see SECURITY.md"
            return _finding("access", _what(problem), problem=fix)
    if access.require_token and not report.has_admin_token:
        seen = "MUSTER_REQUIRE_TOKEN is set, but no token of scope admin is valid"
        return _finding("access", seen, warning=WAY_TO_ADMIN)
    if report.address and ipaddress.ip_address(report.address).is_loopback:
        way = "with a token" if access.require_token else "for this user"
        return _finding("access", f"open on this machine, {way}")
    way = "with" if access.tls_certfile else "without"
    return _finding("access", f"open to other machines, {way} TLS")


def _finding(about: str, seen: str, *, problem: str = "", warning: str = "") -> Finding:
    """Return what was seen; `problem` or `warning` is what to do about it, empty if it is good."""
    if problem:
        return Finding(about, Verdict.PROBLEM, seen, problem)
    return Finding(about, Verdict.WARNING if warning else Verdict.OK, seen, warning)


def finding_lines(findings: list[Finding]) -> Iterator[str]:
    left = len(Verdict.PROBLEM)
    width = max(len(finding.about) for finding in findings)
    for finding in findings:
        yield f"{finding.verdict:<{left}}  {finding.about:<{width}}  {finding.seen}"
        if finding.fix:
            yield f"{'':<{left}}  {'':<{width}}  -> {finding.fix}"


def _what(problem: Mapping[str, str]) -> str:
    return f"{problem['what']}: {problem['why']}" if problem["why"] else problem["what"]
