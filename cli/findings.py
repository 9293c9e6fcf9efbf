"""What `muster validate` says of one thing."""

import errno
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeAlias

_OF_DISKS: Final[Mapping[int | None, str]] = {
    errno.ENOSPC: "make room there",
    errno.EDQUOT: "make room there, or raise the quota of this user",
    errno.EROFS: "mount it for writing",
}


class Verdict(StrEnum):
    OK = "ok"
    WARNING = "warning"
    """It works, and something will be missed."""
    PROBLEM = "problem"
    """Something of Muster does not work until this is mended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line, and with a warning or a problem what to do about it."""

    about: str
    verdict: Verdict
    seen: str
    fix: str = ""


Check: TypeAlias = tuple[str, Callable[[], Finding]]
"""What is looked at, and the look."""


def well(about: str, seen: str) -> Finding:
    return Finding(about=about, verdict=Verdict.OK, seen=seen)


def warning(about: str, seen: str, fix: str) -> Finding:
    return Finding(about=about, verdict=Verdict.WARNING, seen=seen, fix=fix)


def problem(about: str, seen: str, fix: str) -> Finding:
    return Finding(about=about, verdict=Verdict.PROBLEM, seen=seen, fix=fix)


def mending(error: Exception, usual: str) -> str:
    """Return what to do about a disk that is full or read-only, else what is usual."""
    return _OF_DISKS.get(getattr(error, "errno", None), usual)


def lines(findings: list[Finding]) -> Iterator[str]:
    """Yield one line for each, and one below it that says what to do."""
    width = max(len(finding.about) for finding in findings)
    for finding in findings:
        yield f"{finding.verdict:<{len(Verdict.PROBLEM)}}  {finding.about:<{width}}  {finding.seen}"
        if finding.fix:
            yield f"{'':<{len(Verdict.PROBLEM)}}  {'':<{width}}  -> {finding.fix}"
