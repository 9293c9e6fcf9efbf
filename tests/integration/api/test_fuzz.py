"""A short run of the fuzzer: `make fuzz` is the long one."""

from importlib.util import find_spec
from pathlib import Path

import pytest

CASES = 30


@pytest.mark.skipif(find_spec("schemathesis") is None, reason="Schemathesis is not installed")
def test_every_answer_is_as_the_document_says(tmp_path: Path) -> None:
    from stress.security.fuzz_api import run  # noqa: PLC0415  it needs what may be missing

    report = run(tmp_path, cases=CASES, seed=0)
    assert not report.faults, report
