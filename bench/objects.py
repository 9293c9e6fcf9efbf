"""What a checkpoint in an object store costs over bare requests.

    python bench/objects.py

Against a local server (moto in a process of its own, or the store of TEST_S3_ENDPOINT), in turns,
medians: 100 MB against the same bytes by boto3's `upload_fileobj`, and a small state against three
bare puts. Then the requests of each operation. The seconds are the server's: read the ratios.
"""

import io
import statistics
import time
from collections import Counter
from collections.abc import Callable

import numpy as np

from muster.checkpoints.manager import CheckpointManager
from muster.checkpoints.s3 import S3Store
from muster.contracts.location import S3Location
from muster.contracts.shards import Position
from muster.objects.client import S3Client
from tests.support.checkpoint_ranks import commit, manager_of, owner
from tests.support.faulty_store import faulty
from tests.support.s3_server import bare_client, new_bucket, shared_store

SMALL_SAVES = 100
LARGE_SAVES = 5
SMALL = {"weights": np.ones((64, 18)), "bias": np.ones(80, np.float64), "loss": 0.5}
LARGE = {"weights": np.random.default_rng(0).random(13_107_200)}

Act = Callable[[int], object]


def commits(client: S3Client, place: S3Location, state: dict[str, object]) -> Act:
    store = S3Store(client, place)
    store.claim(0, "uid")
    return lambda step: commit(store, 0, step, state)


def in_turns(acts: tuple[Act, Act], count: int) -> list[float]:
    """Return the median seconds of each, without the first, which opens connections."""
    seconds: dict[Act, list[float]] = {act: [] for act in acts}
    for step in range(count + 1):
        for act in acts if step % 2 else reversed(acts):
            began = time.perf_counter()
            act(step)
            seconds[act].append(time.perf_counter() - began)
    return [statistics.median(seconds[act][1:]) for act in acts]


def show(what: str, unit: float, ours: float, bare: float, goal: float) -> None:
    print(f"{what:28}{ours * unit:12.1f}{bare * unit:12.1f}{ours / bare:8.2f}   goal {goal}")


def count_requests() -> None:
    with faulty(shared_store()) as counted:
        client, place = S3Client(counted.access), new_bucket(shared_store())

        def manager(generation: int) -> CheckpointManager:
            return manager_of(S3Store(client, place), owner(generation=generation), print)

        first, second = manager(0), manager(1)
        for what, act in (
            ("first claim, with probe", first.claim),
            ("first save", lambda: first.save(1, Position(step=1), SMALL)),
            ("save", lambda: first.save(2, Position(step=2), SMALL)),
            ("save that retires one", lambda: first.save(3, Position(step=3), SMALL)),
            ("claim", second.claim),
            ("restore", second.restore),
        ):
            counted.operations.clear()
            act()
            kinds = Counter(operation.split()[0] for operation in counted.operations)
            print(f"{what:28}{len(counted.operations):12}{kinds['LIST']:12}   {dict(kinds)}")


def main() -> None:
    access = shared_store()
    client, bare, root = S3Client(access), bare_client(access), new_bucket(access)

    def upload(step: int) -> None:
        content = io.BytesIO(LARGE["weights"].data)
        bare.upload_fileobj(content, root.bucket, f"bare/large{step}")

    def three_puts(step: int) -> None:
        for size, name in (9_216 + 640 + 160, "state"), (560, "manifest"), (80, "LATEST"):
            bare.put_object(Bucket=root.bucket, Key=f"bare/{step}/{name}", Body=bytes(size))

    print(f"{'':28}{'ours':>12}{'bare':>12}{'ratio':>8}")
    small = in_turns((commits(client, root / "small", SMALL), three_puts), SMALL_SAVES)
    show("10 KB, ms", 1e3, *small, goal=1.3)
    large = in_turns((commits(client, root / "large", LARGE), upload), LARGE_SAVES)
    show("100 MB, s", 1, *large, goal=1.1)
    print(f"\n{'':28}{'requests':>12}{'of them LIST':>12}")
    count_requests()


if __name__ == "__main__":
    main()
