"""Says which route a collective takes and why, and what every route would cost.

python -m muster.collectives.explain --ranks 12 --hosts 3 --bytes 100e6
"""

import argparse
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import Final, NoReturn

from muster.collectives.calls import ITEM_BYTES
from muster.collectives.errors import Unsupported
from muster.collectives.planning.link_model import Link, LinkModel, predict
from muster.collectives.routes import ROUTES, Piece, Problem, route_of, rule_of
from muster.contracts.shards import ranges

SHOWN_ROUNDS: Final = 20
SHOWN_PIECES: Final = 3

_ROW: Final = "{:13}{:>10}{:>9}{:>10}{:>12}{:>13}{:>12}{:>15}"
_HEADINGS: Final = ("predicted", "rounds", "messages", "rank sends", "inside host", "host sends")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Exit with one sentence, without the usage."""
        self.exit(2, f"{message}\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the explanation; exits with code 2 and a sentence if an argument is wrong."""
    parser = _Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--bytes", type=float, required=True, help="of the whole buffer")
    parser.add_argument("--operation", choices=ROUTES, default="all_reduce")
    parser.add_argument("--route", default="auto", help="a route, or auto for the one of the rules")
    parser.add_argument("--dtype", choices=ITEM_BYTES, default="float32")
    parser.add_argument("--latency-us", type=float, default=100, help="between hosts")
    parser.add_argument("--bandwidth-mbit", type=float, default=1000, help="of a host's link")
    parser.add_argument("--rank", type=int, default=None, help="list the rounds of this rank")
    given = parser.parse_args(arguments)
    for option, value, least, most in (
        ("--ranks", given.ranks, 1, 65536),
        ("--hosts", given.hosts, 1, given.ranks),
        ("--bytes", given.bytes, 0, 10**15),
        ("--latency-us", given.latency_us, 0, 10**9),
        ("--bandwidth-mbit", given.bandwidth_mbit, 1, 10**9),
        ("--rank", given.rank or 0, 0, given.ranks - 1),
    ):
        if not least <= value <= most:
            parser.error(f"{option} must be from {least} to {most}, not {value}")
    try:
        sys.stdout.writelines(f"{line}\n" for line in _explain(given))
    except Unsupported as error:
        parser.error(str(error))


def _explain(given: argparse.Namespace) -> Iterator[str]:
    operation, itemsize = given.operation, ITEM_BYTES[given.dtype]
    total = int(given.bytes) // itemsize
    hosts = enumerate(ranges(given.ranks, given.hosts))
    problem = Problem(
        world_size=given.ranks,
        bounds=(0, *(stop for _, stop in ranges(total, given.ranks))),
        hosts=tuple(host for host, (start, stop) in hosts for _ in range(start, stop)),
    )
    model = LinkModel(between=Link(given.latency_us / 1e6, given.bandwidth_mbit * 1e6 / 8))
    rule = rule_of(operation, total * itemsize, problem)
    chosen, why = (rule.route, rule) if given.route == "auto" else (given.route, "as asked")
    costs = {
        name: predict(operation, name, problem, itemsize, model)
        for name in {chosen: None, **ROUTES[operation]}
    }
    yield f"{operation} of {total:,} {given.dtype} ({_size(total * itemsize)})"
    yield f"ranks: {given.ranks:,}, hosts: {given.hosts:,}"
    yield f"route: {chosen} ({why})"
    yield f"links: {_link(model.inside)} inside a host, {_link(model.between)} between hosts"
    yield "\n" + _ROW.format("", *_HEADINGS, "host receives")
    for name in sorted(costs, key=lambda name: (name != chosen, costs[name].seconds)):
        seconds, rounds, messages, *sizes = costs[name]
        mark = ">" if name == chosen else " "
        yield _ROW.format(f"{mark} {name}", _time(seconds), rounds, messages, *map(_size, sizes))
    if given.rank is not None:
        route = route_of(operation, chosen, given.rank, problem)
        yield f"\nrank {given.rank}, rounds 1 to {min(SHOWN_ROUNDS, len(route))} of {len(route):,}"
        for number, turn in enumerate(route[:SHOWN_ROUNDS], 1):
            moves = {"send to": turn.sends, "copy from": turn.copies, "add from": turn.adds}
            parts = [_listed(move, pieces) for move, pieces in moves.items() if pieces]
            yield f"{number:4}  {'; '.join(parts) or 'nothing'}"


def _listed(move: str, pieces: Sequence[Piece]) -> str:
    shown = [f"{piece.peer} [{piece.start}, {piece.stop})" for piece in pieces[:SHOWN_PIECES]]
    more = len(pieces) - SHOWN_PIECES
    return f"{move} {', '.join(shown)}" + (f" and {more:,} more" if more > 0 else "")


def _link(link: Link) -> str:
    return f"{_time(link.latency_seconds)} and {_size(link.bytes_per_second)}/s"


def _size(size_bytes: float) -> str:
    return _scaled(size_bytes, "B", "kB", "MB", "GB", "TB", "PB")


def _time(seconds: float) -> str:
    return _scaled(seconds * 1e6, "µs", "ms", "s")


def _scaled(value: float, unit: str, *larger: str) -> str:
    """Return `value` with about three digits, in the first unit that keeps it below 1000."""
    if larger and round(value) >= 1000:  # noqa: PLR2004
        return _scaled(value / 1000, *larger)
    return f"{round(value):,} {unit}" if round(value, 1) >= 100 else f"{value:.3g} {unit}"  # noqa: PLR2004


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without a word
    main()
