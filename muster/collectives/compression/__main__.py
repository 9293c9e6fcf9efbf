"""python -m muster.collectives.compression FILE.safetensors [KIND ...]: what kinds cost and keep.

The file holds gradients. A kind is a name, or JSON: '{"kind": "top_k", "ratio": 0.01}'.
"""

import json
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

import click
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from muster.collectives.compression.kind import Float32, Vector
from muster.collectives.compression.kinds import Compression, kind_of_array, table_of
from muster.contracts.errors import MusterError

TRIED: Final[Sequence[Compression]] = (
    *("fp16", "bf16", "int8", "sign"),
    {"kind": "top_k", "ratio": 0.01},
    {"kind": "top_k", "ratio": 0.01, "values": "int8"},
    {"kind": "top_k", "ratio": 0.01, "values": {"kind": "sign", "bits": 2}},
    {"kind": "random", "ratio": 0.1},
    {"kind": "power_sgd", "rank": 4},
)
_HEADINGS: Final = ("bytes", "ratio", "encode ms", "decode ms", "error", "cosine")


def main(arguments: Sequence[str]) -> None:
    path, *given = arguments or sys.exit(__doc__)
    try:
        arrays = [
            array.astype(np.float32)
            for array in load_file(path).values()
            if array.dtype.kind == "f"
        ]
        asked = [json.loads(kind) if kind.startswith("{") else kind for kind in given]
        click.echo(("{:>14}" + "{:>11}" * 5 + "  kind").format(*_HEADINGS))
        for compression in asked or TRIED:
            name = compression if isinstance(compression, str) else json.dumps(compression)
            row = measure(compression, arrays)
            click.echo("{:14,}{:11.4f}{:11.2f}{:11.2f}{:11.4f}{:11.4f}  {}".format(*row, name))
    except (OSError, SafetensorError, MusterError, ValueError, TypeError) as error:
        sys.exit(f"{path} cannot be measured: {error}")


def measure(compression: Compression, arrays: Sequence[Vector]) -> list[Any]:
    """Return bytes, their ratio, times in ms, relative error and cosine; of one rank, one step."""
    table, outs, sent, times = table_of(compression), [], 0, np.zeros(2)
    for array in arrays:
        kind = kind_of_array(table, array.shape, feedback=False) or Float32()
        kind.encode(array)  # PowerSGD begins at random, and the first time takes new memory
        out, started = np.zeros_like(array), time.perf_counter()
        message = kind.encode(array)
        encoded = time.perf_counter()
        kind.add(message, out)
        times += encoded - started, time.perf_counter() - encoded
        sent += message.nbytes
        outs.append(out)
    before, after = (
        np.concatenate([array.reshape(-1) for array in some]) for some in (arrays, outs)
    )
    length, error = np.linalg.norm(before), np.linalg.norm(after - before)
    cosine = np.dot(before, after) / (length * np.linalg.norm(after) or np.inf)
    return [sent, sent / before.nbytes, *(times * 1e3), error / (length or 1), cosine]


if __name__ == "__main__":
    main(sys.argv[1:])
