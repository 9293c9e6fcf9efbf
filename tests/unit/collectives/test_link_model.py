"""Predicted costs, and the command that prints them."""

import pytest

from muster.collectives.explain import main
from muster.collectives.planning.link_model import Link, LinkModel, Prediction, predict
from muster.collectives.routes import Problem
from muster.contracts.shards import ranges

MODEL = LinkModel(inside=Link(1.0, 100.0), between=Link(10.0, 10.0))


def group(world_size: int, hosts: int, part: int) -> Problem:
    return Problem(
        world_size=world_size,
        bounds=tuple(range(0, part * world_size + 1, part)),
        hosts=tuple(
            host
            for host, (start, stop) in enumerate(ranges(world_size, hosts))
            for _ in range(start, stop)
        ),
    )


@pytest.mark.parametrize(
    ("name", "seconds", "messages", "sent", "inside", "network"),
    [
        # In each of 6 rounds a part of 100 bytes leaves each host: 10 s and 100 / 10 s.
        ("ring", 6 * 20.0, 6, 600, 300, 600),
        # In each of 2 rounds both ranks of a host send 100 bytes to 2 others: 10 s and 400 / 10 s.
        ("direct", 2 * 50.0, 6, 600, 200, 800),
        # Four segments: 1 s and 100 / 100 s inside, before and after 5 rounds of 10 s in which all
        # 400 bytes go between the hosts in 40 s.
        ("two_level", 94.0, 12, 800, 400, 400),
        # Rank 3 sends 400 bytes to rank 1 in 50 s, then rank 2 as many to rank 0; and back.
        ("tree", 2 * 100.0, 2, 800, 400, 800),
    ],
)
def test_prediction_by_hand(
    name: str, seconds: float, messages: int, sent: int, inside: int, network: int
) -> None:
    rounds = {"ring": 6, "direct": 2, "two_level": 7, "tree": 4}[name]
    assert predict("all_reduce", name, group(4, 2, 100), 1, MODEL) == Prediction(
        seconds, rounds, messages, sent, inside, network, network
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("operation", "name", "rounds", "link_bytes"),
    [
        ("all_reduce", "ring", 2 * 4095, 1),
        ("all_reduce", "direct", 2, 8 * 4088),
        ("reduce_scatter", "direct", 1, 8 * 4088),
        ("all_gather", "ring", 4095, 1),
        ("gather", "direct", 1, 4088),
        ("scatter", "direct", 1, 4088),
        ("broadcast", "direct", 1, 4096 * 4088),
    ],
)
def test_sample_of_ranks_stands_for_all(
    operation: str, name: str, rounds: int, link_bytes: int
) -> None:
    problem = group(4096, 512, 1)
    seconds = predict(operation, name, problem, 1, MODEL).seconds
    assert seconds == pytest.approx(rounds * (10.0 + link_bytes / 10.0))


EXPLAINED = """\
all_reduce of 25,000,000 float32 (100 MB)
ranks: 12, hosts: 3
route: two_level (at least 1 MiB, ranks share the link of a host)
links: 20 µs and 5 GB/s inside a host, 100 µs and 125 MB/s between hosts

              predicted   rounds  messages  rank sends  inside host  host sends  host receives
> two_level       1.1 s        9        28      433 MB       300 MB      133 MB         133 MB
  ring           1.47 s       22        22      183 MB       183 MB      183 MB         183 MB
  direct         4.27 s        2        22      183 MB        50 MB      533 MB         533 MB
  tree           11.3 s        6         3      300 MB       200 MB      700 MB         700 MB
  centralised    12.8 s        2        11      1.1 GB       300 MB      800 MB         800 MB
  whole          25.6 s        1        11      1.1 GB       300 MB      3.2 GB         3.2 GB

rank 5, rounds 1 to 9 of 9
   1  send to 4 [0, 6250000)
   2  send to 4 [6250000, 12500000)
   3  send to 4 [12500000, 18750000)
   4  send to 4 [18750000, 25000000)
   5  nothing
   6  copy from 4 [0, 6250000)
   7  copy from 4 [6250000, 12500000)
   8  copy from 4 [12500000, 18750000)
   9  copy from 4 [18750000, 25000000)
"""


def test_explanation(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--ranks", "12", "--hosts", "3", "--bytes", "100e6", "--rank", "5"])
    assert capsys.readouterr().out == EXPLAINED


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--ranks 2 --hosts 3 --bytes 1", "--hosts must be from 1 to 2, not 3"),
        ("--ranks 0 --bytes 1", "--ranks must be from 1 to 65536, not 0"),
        ("--ranks 2 --bytes nan", "--bytes must be from 0 to 1000000000000000, not nan"),
        ("--ranks 2 --bytes 1 --rank 2", "--rank must be from 0 to 1, not 2"),
        (
            "--ranks 2 --bytes 1 --route star --operation all_gather",
            "all_gather has no route 'star': use one of ring, direct",
        ),
        ("--ranks two --bytes 1", "argument --ranks: invalid int value: 'two'"),
    ],
)
def test_wrong_argument_is_one_sentence(
    arguments: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments.split())
    assert (ended.value.code, capsys.readouterr().err) == (2, f"{sentence}\n")
