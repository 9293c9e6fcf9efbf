"""Saves checkpoints through a store that fails, with writers that are replaced but go on.

``python -m stress.objects [OPERATIONS] [SEED]``: in several places at once, claims, commits, reads
and removals meet lost, late, refused, torn and broken answers. After each of them LATEST is looked
at directly. It may only name the last checkpoint that was acknowledged, or one whose commit failed
since; it must be whole, and never go back. A replaced writer commits nothing. After the last claim
there is no unfinished upload, and no state without a manifest.
"""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from xxhash import xxh3_64_hexdigest

from muster.checkpoints.errors import CheckpointDamaged, CheckpointError, StaleGeneration
from muster.checkpoints.format import unpack
from muster.checkpoints.manifest import (
    LATEST,
    MANIFEST,
    MANIFEST_LIMIT_BYTES,
    STATE,
    CheckpointName,
    decode_manifest,
)
from muster.checkpoints.s3 import S3Store
from muster.contracts.location import S3Location
from muster.objects.client import PART_BYTES, S3Client
from stress.runner import Report, chance, main, say
from tests.support.checkpoint_ranks import commit
from tests.support.faulty_store import FAULTS, Rewrite, faulty
from tests.support.s3_server import new_bucket, shared_store

PLACES = 4
FAULT_SHARE = 0.25  # of the requests
LONG_SHARE = 0.02  # of the commits
ANSWER_BYTES = 700  # of all answers but those to reads and listings of much
RETRY_SECONDS = 0.3
LONG = np.arange(PART_BYTES // 8 + 10_000)


def run(_directory: Path, operations: int = 10_000, seed: int = 0) -> Report:
    """Do so many operations."""
    report, root = Report(), new_bucket(shared_store())
    histories = [History(root / str(number), seed) for number in range(PLACES)]
    with ThreadPoolExecutor(PLACES) as pool:
        list(pool.map(lambda history: history.play(operations // PLACES), histories))
    done, failed = Counter[str](), Counter[str]()
    for history in histories:
        done += history.done
        failed += history.failed
        report.faults += history.faults
    report.lines.append(f"done {dict(done)}, failed {dict(failed)}")
    report.lines.append(f"{sum(history.injected for history in histories)} requests with a fault")
    return report


class History:
    """What happened in one place, and what must not have."""

    def __init__(self, place: S3Location, seed: int) -> None:
        self.place = place
        self.draw = chance(f"{seed}/{place.name}")
        self.done, self.failed = Counter[str](), Counter[str]()
        self.faults: list[str] = []
        self.injected = 0
        self._direct = S3Client(shared_store())
        self._acknowledged: CheckpointName | None = None
        self._possible: set[tuple[int, ...]] = set()  # what LATEST may name, but for the revision
        self._seen: CheckpointName | None = None
        self._kept: set[CheckpointName] = set()
        self._replaced: list[tuple[S3Store, int]] = []
        self._step = 0

    def play(self, operations: int, rewrite: Rewrite = lambda _operation, _headers: None) -> None:
        """Do so many operations; `rewrite` may break the store."""
        with faulty(shared_store()) as store:
            client = S3Client(store.access, retry_seconds=RETRY_SECONDS)
            client.probed.add(self.place.bucket)
            store.fault, store.rewrite = self._fault, rewrite
            writer, generation = S3Store(client, self.place), 0
            is_claimed = has_claimed = False
            for number in range(operations):
                kind = self.draw.choices(
                    ["commit", "replace", "replaced commit", "restart", "remove"],
                    [60, 8, 15, 5, 12],
                )[0]
                try:
                    if kind in {"replace", "restart"}:
                        if has_claimed:
                            self._replaced = [*self._replaced[-3:], (writer, generation)]
                        has_claimed = False
                        generation += kind == "replace"
                        writer, is_claimed = S3Store(client, self.place), False
                    if kind == "replaced commit" and self._replaced and is_claimed:
                        self._commit_replaced()
                    elif kind == "remove" and len(self._kept) > 2:
                        self._remove(writer)
                    else:
                        if not is_claimed:
                            writer.claim(generation, "uid")
                            has_claimed = True
                        is_claimed = False
                        self._commit(writer, generation)
                        is_claimed = True
                    self.done[kind] += 1
                except StaleGeneration as error:
                    self.faults.append(f"{self.place}: the newest writer is refused: {error}")
                except CheckpointError:
                    self.failed[kind] += 1
                self._check()
                if number % 500 == 499:
                    say(f"{self.place.name}: {number + 1} operations, {self.injected} faults")
            store.fault = {}.get
            store.await_late()
            S3Store(client, self.place).claim(generation + 1, "uid")
        self._check()
        self._check_rest()

    def _fault(self, _operation: str) -> str | None:
        if self.draw.random() > FAULT_SHARE:
            return None
        self.injected += 1
        fault = self.draw.choice(FAULTS)
        return f"cut {self.draw.randrange(ANSWER_BYTES)}" if fault.startswith("cut ") else fault

    def _commit(self, writer: S3Store, generation: int) -> None:
        self._step += 1
        self._possible.add((generation, self._step))
        name = self._save(writer, generation)
        self._acknowledged, self._possible = name, {name[:2]}
        self._kept.add(name)

    def _save(self, writer: S3Store, generation: int) -> CheckpointName:
        long = LONG if self.draw.random() < LONG_SHARE else LONG[:100]
        content = {"weights": long + self._step, "step": self._step}
        return commit(writer, generation, self._step, content)

    def _commit_replaced(self) -> None:
        """A writer that was replaced goes on: it must fail, in whatever way."""
        writer, generation = self.draw.choice(self._replaced)
        try:
            name = self._save(writer, generation)
        except CheckpointError:
            return
        self.faults.append(f"{self.place}: a replaced writer has committed {name}")

    def _remove(self, writer: S3Store) -> None:
        name = min(self._kept - {self._acknowledged})
        self._kept.discard(name)
        writer.remove(name)

    def _check(self) -> None:
        """Look at LATEST, and at what it names."""
        reader = S3Store(self._direct, self.place)
        latest = reader.latest()
        if (latest is None and self._acknowledged) or (latest and latest[:2] not in self._possible):
            self.faults.append(f"{self.place}: LATEST names {latest}, not {self._acknowledged}")
        if (latest or CheckpointName(-1, 0)) < (self._seen or CheckpointName(-1, 0)):
            self.faults.append(f"{self.place}: LATEST went back from {self._seen} to {latest}")
        if latest not in {None, self._seen}:
            self._verify(reader, latest)
        self._seen = latest

    def _verify(self, reader: S3Store, name: CheckpointName) -> None:
        try:
            content = reader.read(name, MANIFEST, MANIFEST_LIMIT_BYTES)
            manifest = decode_manifest(content, str(name))
            facts = manifest.files[STATE]
            state = reader.read(name, STATE, facts.size_bytes)
            assert xxh3_64_hexdigest(state) == facts.xxh3
            values = unpack(state, manifest.values, str(name))
            assert values["weights"][0] == values["step"] == name.step
        except (CheckpointDamaged, AssertionError) as error:
            self.faults.append(f"{self.place}: {name} is damaged: {error}")

    def _check_rest(self) -> None:
        reader = S3Store(self._direct, self.place)
        for name in self._kept:
            self._verify(reader, name)
        if uploads := [*self._direct.uploads(self.place)]:
            self.faults.append(f"{self.place}: unfinished uploads: {uploads}")
        listed = {stored.name for stored in self._direct.list(self.place)} - {LATEST}
        whole = {text.partition("/")[0] for text in listed if text.endswith(MANIFEST)}
        if rest := {text for text in listed if text.partition("/")[0] not in whole}:
            self.faults.append(f"{self.place}: states without a manifest: {rest}")


if __name__ == "__main__":
    main(run)
