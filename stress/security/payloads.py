"""Texts that have caused path traversal and command injection in other software."""

from collections.abc import Iterator
from pathlib import Path

_UPWARDS = (
    "../",
    "..\\",
    "..%2f",
    "..%252f",
    "%2e%2e/",
    "%2e%2e%2f",
    "..%c0%af",
    "..%5c",
    "..;/",
    "....//",
    ".././",
    "x/../../",
    "../\u2215",
    "..\uff0f",
    "\u2025/",
)

_PLACES = (
    "/etc/passwd",
    "/proc/self/environ",
    "/proc/self/cwd",
    "/proc/1/root",
    "/dev/fd/3",
    "/dev/stdin",
    "~/.ssh/id_rsa",
    "~root",
    "$HOME",
    "${HOME}/.ssh",
    "file:///etc/passwd",
    "file://localhost/etc/passwd",
    "http://127.0.0.1:1/",
    "s3://bucket/../key",
    "\\\\host\\share",
    "C:\\windows\\win.ini",
    "//host/share",
    "/",
    "//",
    ".",
    "..",
    "...",
    "./",
    "/.",
    "",
    " ",
    "con",
    "nul",
    ".git/config",
    "muster.db",
    "LATEST",
    "worker_0",
    "x" * 256,
    "x/" * 300,
    "x" * 4097,
    "a\0b",
    "\ud800",
    "\u202e/cte",
    "e\u0301/\u00e9",
)

_SHELLS = (
    "; touch {0}",
    "& touch {0}",
    "&& touch {0}",
    "| touch {0}",
    "|| touch {0}",
    "$(touch {0})",
    "`touch {0}`",
    "\ntouch {0}\n",
    "\r\ntouch {0}",
    "' ; touch {0} ; '",
    '" ; touch {0} ; "',
    "> {0}",
    ">> {0}",
    "2> {0}",
    "< /etc/passwd > {0}",
    "x={0} touch $x",
    "{{touch,{0}}}",
    "touch${{IFS}}{0}",
    "$((1)) ; touch {0}",
    "~; touch {0}",
    "* ; touch {0}",
    "# {0}",
    "!touch {0}",
    "\\; touch {0}",
)

_LANGUAGES = (
    "__import__('os').system('touch {0}')",
    "{{{{ open('{0}', 'w') }}}}",
    "{{% import os %}}",
    "%(message)s %n%s%x {0}",
    "{{0.__class__.__init__.__globals__}}",
    "${{jndi:ldap://127.0.0.1:1/a}}",
    "'; DROP TABLE jobs; --",
    "' OR '1'='1",
    "'; ATTACH DATABASE '{0}' AS x; CREATE TABLE x.t (c); --",
    "'; COPY jobs TO '{0}'; --",
    "<script>fetch('/jobs')</script>",
    "<?xml version='1.0'?><!DOCTYPE a [<!ENTITY b SYSTEM 'file:///etc/passwd'>]><a>&b;</a>",
    "=cmd|' /c touch {0}'!A1",
    "!!python/object/apply:os.system ['touch {0}']",
    "&a [*a]",
    "X\r\nX-Injected: 1",
    "X\r\n\r\nHTTP/1.1 200 OK",
    "\x1b]0;title\x07\x1b[2J",
    "\x7f\x08\x08",
    "-oProxyCommand=touch {0}",
    "--help",
    "-c",
    "--",
    "-",
    "@{0}",
    "LD_PRELOAD={0}",
    "PATH=",
    "A=B=C",
    "\u2028\u2029\ufeff",
    "NaN",
    "null",
    "0x7fffffffffffffff",
    "1e999",
)


def traversals(target: Path) -> Iterator[str]:
    """Yield paths that may lead to `target` from the directories of an installation."""
    yield str(target)
    for up in _UPWARDS:
        for depth in (1, 3, 12):
            yield f"{up * depth}{target.name}"
        yield f"{up * 12}{str(target).lstrip('/')}"
    yield from _PLACES


def injections(mark: Path) -> Iterator[str]:
    """Yield texts that create the file `mark` if they are executed or interpreted."""
    for pattern in (*_SHELLS, *_LANGUAGES):
        yield pattern.format(mark)
