"""How a checkpoint is told of: as a row, as a document, and as lines."""

import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any, Final

import msgspec
import numpy as np

from cli.sizes import size
from cli.tables import Cell, table
from cli.times import shown
from muster.checkpoints.comparison import shape
from muster.checkpoints.identity import identity_of
from muster.checkpoints.reader import Checkpoint
from muster.checkpoints.shelves import Found, Shelf
from muster.client.progress import duration

_ARRAYS_HEADER: Final = ("array", "dtype", "shape", "bytes", "sha256")

SHOWN_DIGITS: Final = 16
"""Of a sha256 in a table: enough to tell two apart."""


def entry(shelf: Shelf, one: Found) -> dict[str, Any]:
    """Return what ``-o json`` says of a checkpoint in a list."""
    manifest = one.manifest
    return {
        "whose": shelf.whose,
        "rank": shelf.rank,
        "path": f"{shelf.reader.directory}/{one.name}",
        "step": one.name.step,
        "generation": one.name.generation,
        "epoch": manifest and manifest.position.epoch,
        "saved_at": manifest and manifest.time,
        "size_bytes": manifest and sum(file.size_bytes for file in manifest.files.values()),
        "state": one.condition.value,
        "damage": one.damage or None,
    }


def row(shelf: Shelf, one: Found) -> tuple[Cell, ...]:
    """Return the same for a table."""
    said = entry(shelf, one)
    saved_at: str | None = said["saved_at"]
    return (
        said["whose"],
        said["step"],
        said["epoch"],
        None if one.manifest is None else size(said["size_bytes"]),
        saved_at and shown(saved_at),
        saved_at and _age(saved_at),
        said["state"],
    )


def _age(saved_at: str) -> str:
    age = datetime.now(UTC) - datetime.fromisoformat(saved_at)
    return duration(max(0.0, age.total_seconds()))


def document(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return everything about a checkpoint but the bytes of its arrays."""
    manifest = checkpoint.manifest
    return {
        "job_id": manifest.job_id,
        "job_uid": manifest.job_uid,
        "rank": manifest.rank,
        "world_size": manifest.world_size,
        "step": manifest.step,
        "generation": manifest.generation,
        "saved_at": manifest.time,
        "sha256": identity_of(checkpoint),
        "position": msgspec.to_builtins(manifest.position),
        "values": manifest.values,
        "arrays": [
            {
                "name": name,
                "dtype": str(value.dtype),
                "shape": list(value.shape),
                "size_bytes": value.nbytes,
                "sha256": sha256(np.ascontiguousarray(value).data).hexdigest(),
            }
            for name, value in sorted(checkpoint.state.items())
            if isinstance(value, np.ndarray)
        ],
    }


def lines_of(body: Mapping[str, Any]) -> Iterator[str]:
    """Yield a document as lines for people."""
    facts = {
        "job": body["job_id"],
        "rank": f"{body['rank']} of {body['world_size']}",
        "step": f"{body['step']}, saved by generation {body['generation']}",
        "saved at": f"{shown(body['saved_at'])} UTC",
        "sha256": body["sha256"],
        "position": json.dumps(body["position"])[1:-1].replace('"', ""),
        **{f"value {name}": json.dumps(value) for name, value in sorted(body["values"].items())},
    }
    width = max(map(len, facts))
    for name, text in facts.items():
        yield f"{name:<{width}}  {text}"
    if body["arrays"]:
        yield ""
        yield from table(_ARRAYS_HEADER, map(_array_row, body["arrays"]))


def _array_row(array: Mapping[str, Any]) -> tuple[Cell, ...]:
    return (
        array["name"],
        array["dtype"],
        shape(array["shape"]),
        array["size_bytes"],
        f"{array['sha256'][:SHOWN_DIGITS]}…",
    )
