"""torch.distributed over our collectives, and our collectives over torch.distributed."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from muster.collectives.compression.kinds import Compression
from tests.support.torch_ranks import (
    KILLED,
    at_home,
    callbacks_that_wait,
    columns,
    compressed,
    death_over_gloo,
    different_operations,
    groups_of_some,
    groups_one_after_the_other,
    hook_with_a_death,
    late_rank,
    messages_in_a_ring,
    met_anew,
    operation_with_a_death,
    over_gloo,
    profiled,
    refused_calls,
    run_ranks,
    trained,
    training_with_a_death,
    uneven_batches,
)
from tests.support.torch_suite import outcomes

pytestmark = pytest.mark.slow  # each rank is a process

SUITE = [
    "test_all_gather_coalesced_with_empty",
    "test_all_gather_object_default_pg",
    "test_all_reduce_coalesced_product",
    "test_all_reduce_product",
    "test_all_reduce_sum_complex",
    "test_barrier_timeout_full_group",
    "test_batch_isend_irecv_gloo_tags",
    "test_get_backend",
    "test_irecv",
    "test_scatter_complex",
    "test_send_recv_any_source",
    "test_send_recv_with_tag",
    "test_sparse_all_reduce_sum",
]

REFUSALS = """\
all_reduce in group 0 failed: band combines bits, which float32 has no use for: use integers
muster does not support this ReduceOp of sparse tensors: use SUM
muster does not support a sparse tensor here: call to_dense() first
muster does not support the sum of bool: use MAX for or, MIN for and
broadcast in group 0 failed: expected a message of 16 bytes from rank 0, got 12: \
use the same size on both ends
[2.0, 2.0, 2.0]""".splitlines()


@pytest.mark.parametrize(
    ("backend", "world_size"),
    [("muster", 1), ("muster", 2), ("muster", 3), ("muster", 4), ("staged", 2), ("tcp", 3)],
)
def test_operations_equal_those_of_gloo(backend: str, world_size: int, tmp_path: Path) -> None:
    different = run_ranks(different_operations, world_size, tmp_path / "store", backend)
    assert different == [[]] * world_size


@pytest.mark.parametrize(
    ("compression", "most"),
    [
        ("int8", 0.4),
        ({"kind": "top_k", "ratio": 0.1, "values": "int8"}, 0.3),
        ({"kind": "power_sgd", "rank": 2}, 0.3),
    ],
    ids=str,
)
def test_hook_of_ddp_trains_alike_over_both_groups(
    compression: Compression, most: float, tmp_path: Path
) -> None:
    found = [
        run_ranks(compressed, 2, tmp_path / backend, backend, compression, torch.float32)
        for backend in ("gloo", "muster")
    ]
    assert len({str(rank["parameters"]) for ranks in found for rank in ranks}) == 1
    assert all(rank["losses"][-1] < rank["losses"][0] / 3 for ranks in found for rank in ranks)
    assert 0.01 < found[0][0]["ratio"] < most


def test_hook_leaves_other_types_to_torch(tmp_path: Path) -> None:
    first, second = run_ranks(compressed, 2, tmp_path / "store", "gloo", "int8", torch.float64)
    assert first["parameters"] == second["parameters"]
    assert first["ratio"] is None


@pytest.mark.parametrize("backend", ["gloo", "muster"])
def test_hook_fails_when_a_rank_dies(backend: str, tmp_path: Path) -> None:
    first, second = run_ranks(hook_with_a_death, 2, tmp_path / "store", backend)
    assert second == KILLED
    assert first != "it went on"  # gloo and we have several words for it
    assert "Unable to cast" not in first, "an exception is no tensor"


@pytest.mark.parametrize(
    ("kind", "world_size"),
    [("ddp", 2), ("unused", 3), ("fsdp", 2), ("hsdp", 4), ("accelerate", 2)],
)
def test_training_reaches_the_parameters_of_gloo(
    kind: str, world_size: int, tmp_path: Path
) -> None:
    if kind == "accelerate":
        pytest.importorskip("accelerate")
    ours, theirs = (
        run_ranks(trained, world_size, tmp_path / backend, backend, kind)
        for backend in ("muster", "gloo")
    )
    for one, other in zip(ours[0], theirs[0], strict=True):
        assert one == pytest.approx(other, rel=1e-5, abs=1e-7)
    assert ours == ours[:1] * world_size


@pytest.mark.parametrize("backend", ["muster", "staged"])
def test_only_the_given_columns_change(backend: str, tmp_path: Path) -> None:
    assert run_ranks(columns, 2, tmp_path / "store", backend) == [
        [[1, 3, 3, 2], [1, 3, 3, 2]],
        [[2, 3, 3, 2], [2, 3, 3, 2]],
    ]


def test_messages_go_round_a_ring(tmp_path: Path) -> None:
    assert run_ranks(messages_in_a_ring, 3, tmp_path / "store", "muster") == [True] * 3


@pytest.mark.parametrize("kind", ["all_reduce", "barrier", "recv"])
@pytest.mark.parametrize("backend", ["muster", "tcp"])
def test_death_ends_an_operation(kind: str, backend: str, tmp_path: Path) -> None:
    first, killed, third = run_ranks(operation_with_a_death, 3, tmp_path / "store", backend, kind)
    assert killed == KILLED
    assert {first, third} <= {"ChannelClosed", "Aborted"}


def test_death_ends_a_step_of_ddp(tmp_path: Path) -> None:
    first, killed, third = run_ranks(training_with_a_death, 3, tmp_path / "store", "muster")
    assert killed == KILLED
    for error in (first, third):
        assert "is closed" in error or "left the operation" in error


def test_callbacks_may_wait_for_operations(tmp_path: Path) -> None:
    ours = run_ranks(callbacks_that_wait, 2, tmp_path / "store", "muster")
    assert ours == [[2.0**5] * 2] * 2


def test_ranks_with_fewer_batches_join(tmp_path: Path) -> None:
    ours, theirs = (
        run_ranks(uneven_batches, 2, tmp_path / backend, backend) for backend in ("muster", "gloo")
    )
    assert ours == theirs


def test_operations_are_events_of_the_profiler(tmp_path: Path) -> None:
    for events in run_ranks(profiled, 2, tmp_path / "store", "muster"):
        assert events == [("muster:all_reduce", True), ("muster:barrier", False)]


def test_suite_of_torch_passes() -> None:
    """A part of it; ``python -m stress.torch_suite`` runs all."""
    pytest.importorskip("expecttest")  # the suite needs it
    failed = [it for it in outcomes("muster", 3, SUITE) if it.status != "passed"]
    assert not failed


def test_groups_may_share_ranks(tmp_path: Path) -> None:
    assert run_ranks(groups_of_some, 4, tmp_path / "store", "muster") == [
        [11, 1101, 1111],
        [11, 110, 1111],
        [1100, 1101, 110, 1111],
        [1100, 1101, 1000, 1111],
    ]


def test_group_can_be_made_again(tmp_path: Path) -> None:
    assert run_ranks(groups_one_after_the_other, 2, tmp_path / "store", "muster") == [[2] * 3] * 2


def test_device_may_be_named(tmp_path: Path) -> None:
    assert (
        run_ranks(groups_one_after_the_other, 2, tmp_path / "store", "cpu:muster") == [[2] * 3] * 2
    )


def test_refusal_says_what_to_use(tmp_path: Path) -> None:
    _, second = run_ranks(refused_calls, 2, tmp_path / "store", "muster")
    assert second == REFUSALS


def test_timeout_leaves_the_group_usable(tmp_path: Path) -> None:
    answers = run_ranks(late_rank, 2, tmp_path / "store", "muster")
    assert answers == [["Timeout", "2.0"], ["2.0"]]


def test_our_collectives_run_over_gloo(tmp_path: Path) -> None:
    for result in run_ranks(over_gloo, 2, tmp_path / "store"):
        assert result == {
            "hosts": (0, 0),
            "cuda": False,
            "sum": 2 + 5,
            "gathered": [[0, 7], [3, 10]],
            "timeout": 0.05,
            "sizes": (4, 5),
            "message": b"five!",
            "both": [b"first", b"second"],
        }


def test_death_over_gloo_ends_our_collectives(tmp_path: Path) -> None:
    assert run_ranks(death_over_gloo, 2, tmp_path / "store") == ["rank 1 is gone", KILLED]


@pytest.mark.parametrize("world_size", [2, 3])
def test_discovered_group_trains_to_the_same_bits(world_size: int, tmp_path: Path) -> None:
    found, met = (
        run_ranks(trained, world_size, tmp_path / backend, backend, "ddp")
        for backend in ("home", "tcp")
    )
    assert found == met


@pytest.mark.parametrize("world_size", [2, 3])
def test_discovered_group_needs_no_other_port(world_size: int, tmp_path: Path) -> None:
    answers = run_ranks(at_home, world_size, tmp_path / "store")
    for answer in answers:
        no_group, other_size = answer["refused"]
        assert no_group == "muster:// needs a group: call muster.mesh.discover(peers=…) first"
        assert other_size.endswith("give init_process_group no other rank and world_size")
        assert answer["listening"] == [True]
        assert answer["rank"] is True
        assert answer["average"] == [sum(range(world_size)) / world_size] * 3
        is_right, values, *_ = answer["store"]
        assert is_right
        assert values == [bytes([255, rank]) for rank in range(world_size)]
    assert [sorted(answer["from"]) for answer in answers if "from" in answer] == [
        [*range(1, world_size)]
    ]
    (last,) = [answer["store"][2:] for answer in answers if len(answer["store"]) > 2]
    is_there, created, kept, keys, is_removed, is_removed_again, *errors = last
    assert (is_there, is_removed, is_removed_again) == (False, True, False)
    assert (created, kept) == (b"first", b"first")
    assert keys >= world_size + 3
    assert [error.lstrip("0123456789 ").partition(":")[0] for error in errors] == [
        "wait timeout",
        "add failed in the store",
        "bytes are too long for a store",
    ]


def test_parts_of_a_discovered_group_work(tmp_path: Path) -> None:
    answers = run_ranks(groups_of_some, 4, tmp_path / "store", "home")
    assert sorted(answers) == sorted(
        [
            [11, 1101, 1111],
            [11, 110, 1111],
            [1100, 1101, 110, 1111],
            [1100, 1101, 1000, 1111],
        ]
    )


def test_discovered_group_can_be_made_again(tmp_path: Path) -> None:
    assert run_ranks(groups_one_after_the_other, 2, tmp_path / "store", "home") == [[2] * 3] * 2


def test_new_group_follows_a_meeting_anew(tmp_path: Path) -> None:
    answers = run_ranks(met_anew, 3, tmp_path / "store")
    survivors = [answer for answer in answers if answer != KILLED]
    assert survivors == [["PeerGone", "PeerGone", True, 2.0]] * 2
