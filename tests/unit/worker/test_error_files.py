"""What a program writes down of its error may be anything."""

import json
import os
from pathlib import Path

import pytest

from worker.error_files import FILE_LIMIT_BYTES, error_in


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "error.json"


def test_the_message_of_torchs_record_is_found(path: Path) -> None:
    extra = {"py_callstack": "Traceback …", "timestamp": "1700000000"}
    path.write_text(json.dumps({"message": {"message": "ValueError: no", "extraInfo": extra}}))
    assert error_in(path) == "ValueError: no"


def test_a_message_may_be_a_mere_text(path: Path) -> None:
    path.write_text('{"message": " signal 11 \\n", "errorCode": 3}')
    assert error_in(path) == "signal 11"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b'{"message": {"message": "half',
        b"null",
        b"[]",
        b'{"message": null}',
        b'{"message": 3}',
        b'{"message": {"text": "no"}}',
        b'{"message": "  "}',
        b'{"message": "\xff"}',
        b'{"a": ' + b"[" * 100_000,
        b'{"message": "' + b"x" * FILE_LIMIT_BYTES + b'"}',
    ],
)
def test_what_makes_no_sense_is_no_error(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    assert error_in(path) is None


def test_what_is_no_file_is_no_error_and_keeps_nobody_waiting(path: Path, tmp_path: Path) -> None:
    assert error_in(path) is None
    os.mkfifo(path)
    assert error_in(path) is None
    path.unlink()
    path.mkdir()
    assert error_in(path) is None
    (tmp_path / "elsewhere").write_text('{"message": "of another"}')
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    assert error_in(tmp_path / "link") is None
