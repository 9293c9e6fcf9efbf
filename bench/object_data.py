"""What data sets in an object store cost, against a plain client, a directory and an LRU cache.

    python bench/object_data.py

The store is moto's server on this machine, or the one of TEST_S3_ENDPOINT. moto moves some ten
MiB/s, so read the ratios and the numbers of requests.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1]))  # the server and the proxy of the tests

from muster.contracts.location import S3Location
from muster.contracts.settings.services import S3Settings
from muster.contracts.shards import Reading
from muster.datasets.cache import ShardCache
from muster.datasets.reader import SampleReader
from muster.datasets.schema import Contents
from muster.datasets.source import DatasetFacts, DataSource, LocalSource, shard_name
from muster.datasets.sources.s3 import S3Source
from muster.datasets.synthetic import synthetic
from muster.datasets.writer import upload_dataset, write_dataset
from muster.objects.client import S3Client
from tests.support.faulty_store import FaultyStore, faulty
from tests.support.s3_server import bare_client, new_bucket, put_files, shared_store, store_settings

SHARDS = 64
SHARD_BYTES = 4 << 20
LINE = bytes(1023)
FACTS = DatasetFacts(
    kind="bench",
    samples=SHARDS * SHARD_BYTES // (len(LINE) + 1),
    shards=SHARDS,
    features=1,
    classes=2,
    seed=0,
)
RANKS = 4
JOBS = 2
THREADS = 8
ROUNDS = 3
EPOCHS = 4
READS = 7


def at_once(run: Callable[[int], object], numbers: range) -> None:
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(run, numbers))


def main() -> int:
    access = shared_store()
    with faulty(access) as store:
        client = S3Client(access)
        place = new_bucket(access) / "cold"
        upload_dataset(place, client, Contents(FACTS, (LINE for _ in range(FACTS.samples))))
        cold_starts(access, store, place)
        half_a_cache(store, place)
        filled_cache(client, place.parent / "filled")
        starts(client, store, place.parent)
    return 0


class Job:
    """A process that reads all shards once: a job with its ranks, or a plain client."""

    def __init__(self, access: S3Settings, place: S3Location, cache: str) -> None:
        arguments = [access.endpoint, access.access_key, access.secret_key]
        command = [
            sys.executable,
            __file__,
            cache,
            *map(str, arguments),
            place.bucket,
            place.prefix,
        ]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        self.line()  # boto3 is imported

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()


def read_all(cache: str, endpoint: str, key: str, secret: str, bucket: str, prefix: str) -> None:
    """Read all shards once when standard input is closed; print when the first was there."""
    place = S3Location(bucket, prefix)
    access = store_settings(endpoint, key, secret)
    ours, bare = S3Client(access), bare_client(access)
    print(flush=True)
    sys.stdin.read()
    begun = time.monotonic()
    firsts = []

    def get(number: int) -> None:
        key = (place / shard_name(number)).prefix
        bare.get_object(Bucket=bucket, Key=key)["Body"].read()
        firsts.append(time.monotonic() - begun)

    def rank(number: int) -> None:
        reading = Reading(rank=number, world_size=RANKS)
        for idx in reading.shard_idxs(len(source.shards)):
            source.path(idx, reading)
            firsts.append(time.monotonic() - begun)

    if cache:
        source = S3Source(place, ours, ShardCache(Path(cache), 1 << 40))
        at_once(rank, range(RANKS))
    else:
        at_once(get, range(SHARDS))
    print(min(firsts), flush=True)


def run_jobs(
    access: S3Settings, place: S3Location, *, jobs: int, cache: str
) -> tuple[float, float]:
    """Return after how many seconds all have read all shards, and one the first."""
    running = [Job(access, place, cache) for _ in range(jobs)]
    begun = time.monotonic()
    for job in running:
        job.go()
    first = min(float(job.line()) for job in running)
    seconds = time.monotonic() - begun
    for job in running:
        if job.process.wait() != 0:
            raise SystemExit("a reading process failed")
    return seconds, first


def cold_starts(access: S3Settings, store: FaultyStore, place: S3Location) -> None:
    ours, plain = [], []
    for _ in range(ROUNDS):
        plain.append(run_jobs(access, place, jobs=1, cache=""))
        with tempfile.TemporaryDirectory() as cache:
            ours.append(run_jobs(access, place, jobs=JOBS, cache=cache))
    store.operations.clear()
    with tempfile.TemporaryDirectory() as cache:
        run_jobs(store.access, place, jobs=JOBS, cache=cache)
    gets = [done for done in store.operations if done.startswith("GET shard")]
    seconds, first = (statistics.median(figures) for figures in zip(*ours, strict=True))
    bare_seconds = statistics.median(seconds for seconds, _ in plain)
    mib = SHARDS * SHARD_BYTES / (1 << 20)
    print(f"cold start, {SHARDS} shards, {mib:.0f} MiB, {JOBS} jobs of {RANKS} ranks at once:")
    print(f"  {len(gets)} requests for {len(set(gets))} shards")
    print(f"  first shard after {first:.2f} s, all after {seconds:.2f} s")
    print(
        f"  {mib / seconds:.1f} MiB/s; a bare client with {THREADS} threads "
        f"{mib / bare_seconds:.1f} MiB/s: x{bare_seconds / seconds:.2f}"
    )


def half_a_cache(store: FaultyStore, place: S3Location) -> None:
    half = SHARDS // 2
    lru: OrderedDict[int, None] = OrderedDict()
    ours, theirs = [], []
    with tempfile.TemporaryDirectory() as directory:
        cache = ShardCache(Path(directory), (half + 1) * SHARD_BYTES - 1)
        source = S3Source(place, S3Client(store.access), cache)
        for epoch in range(EPOCHS):
            store.operations.clear()
            missed = 0
            for idx in range(SHARDS):
                source.path(idx, Reading(epochs_left=EPOCHS - epoch - 1))
                missed += idx not in lru
                lru[idx] = None
                lru.move_to_end(idx)
                if len(lru) > half:
                    lru.popitem(last=False)
            ours.append(len(store.operations) / SHARDS)
            theirs.append(missed / SHARDS)
    shown = ", ".join(f"{share:.2f}" for share in ours[1:])
    print(
        f"cache of half the data set: downloaded in each later epoch / data set {shown}; "
        f"LRU {max(theirs[1:]):.2f}"
    )


def filled_cache(client: S3Client, place: S3Location) -> None:
    with tempfile.TemporaryDirectory() as directory:
        disk = Path(directory, "disk")
        write_dataset(disk, synthetic(samples=100_000, shards=16))
        upload_dataset(place, client, synthetic(samples=100_000, shards=16))
        cache = ShardCache(Path(directory, "cache"), 1 << 40)
        sources = [LocalSource(disk), S3Source(place, client, cache)]
        costs = [[read_cost(source) for source in sources] for _ in range(READS + 1)][1:]
    local, cached = (min(cost) for cost in zip(*costs, strict=True))
    print(
        f"reading 100,000 samples, processor time: directory {local * 1e3:.0f} ms, filled cache "
        f"{cached * 1e3:.0f} ms: x{cached / local:.3f}"
    )


def read_cost(source: DataSource) -> float:
    begun = time.process_time()
    for _ in SampleReader(lambda: source, 1).batches(32, msgspec.json.Decoder()):
        pass
    return time.process_time() - begun


def starts(client: S3Client, store: FaultyStore, bucket: S3Location) -> None:
    counted = S3Client(store.access)
    with tempfile.TemporaryDirectory() as cache:
        for shards in (100, 1_000, 10_000):
            facts, listed = bucket / f"facts-{shards}", bucket / f"listed-{shards}"
            upload_dataset(facts, client, synthetic(samples=shards, shards=shards, features=1))
            at_once(
                lambda n, at=listed: put_files(client, at, {shard_name(n): b"1\n"}), range(shards)
            )
            requests, seconds = [], []
            for place in (facts, listed):
                store.operations.clear()
                begun = time.monotonic()
                S3Source(place, counted, ShardCache(Path(cache), 1 << 40))
                seconds.append(time.monotonic() - begun)
                requests.append(len(store.operations))
            print(
                f"start over {shards:,} shards: {requests[0]} request with dataset.json "
                f"({seconds[0]:.2f} s), {requests[1]} without ({seconds[1]:.2f} s)"
            )


if __name__ == "__main__":
    sys.exit(read_all(*sys.argv[1:]) if sys.argv[1:] else main())
