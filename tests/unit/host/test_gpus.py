"""Which GPUs a program may use, and who has them."""

import os
import subprocess
import uuid
from pathlib import Path

import pytest

from muster.host.gpus import (
    GpusBusy,
    claimed,
    describe_gpus,
    is_claimed,
    list_gpus,
    measure_gpus,
    visible_gpus,
)
from tests.support.gpus import show_use, write_nvidia_smi

A, B, C = "GPU-8932f937", "GPU-5f2cd0a1", "GPU-5f000000"
BOARD = "54fa04a2-d61e-5e1c-9c1f-7a52b1a5d1a3"  # of a Jetson


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        (None, 4),
        ("", 0),
        ("0,1", 2),
        (" 2 , 0", 2),
        ("-1", 0),
        ("GPU-8932f937,GPU-5f2cd0a1", 2),
        ("MIG-8932f937", 1),
    ],
)
def test_visible_gpus_are_counted(tmp_path: Path, visible: str | None, count: int) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert visible_gpus(environ, tmp_path) == count
    if visible:
        assert visible_gpus(environ, tmp_path / "none") == 0


@pytest.mark.parametrize(
    ("visible", "listed"),
    [
        (None, [A, B, C, BOARD]),
        ("", []),
        ("-1", []),
        ("MIG-8932f937", []),
        ("0, 3", [A, C]),
        ("4", [BOARD]),
        (f"{C},{A}", [A, C]),
        ("GPU-5f", [B, C]),
        ("GPU-54fa", [BOARD]),
    ],
)
def test_gpus_are_listed_by_uuid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, listed: list[str]
) -> None:
    write_nvidia_smi(tmp_path, f"printf '{A}\\n{B}\\n[GPU is lost]\\n{C}\\n{BOARD}\\n'")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert list_gpus(environ) == listed


def test_gpus_are_described_as_far_as_nvidia_smi_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = f"GPU 0: NVIDIA H100 (UUID: {A})"
    write_nvidia_smi(tmp_path, f"[ $1 = -L ] && echo '{line}'")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert describe_gpus() == [line]
    write_nvidia_smi(tmp_path, "exit 9")
    assert describe_gpus() == []


def test_no_nvidia_smi_and_one_that_fails_are_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FileNotFoundError):
        list_gpus({})
    write_nvidia_smi(tmp_path, "echo no driver; exit 9")
    with pytest.raises(subprocess.CalledProcessError) as caught:
        list_gpus({})
    assert caught.value.stdout == "no driver\n"


def test_nvidia_smi_that_does_not_answer_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_nvidia_smi(tmp_path, "exec sleep 600")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr("muster.host.gpus.ANSWER_SECONDS", 0.01)
    with pytest.raises(GpusBusy, match="waits for nvidia-smi"):
        list_gpus({})


def test_a_gpu_has_one_owner_at_a_time() -> None:
    uuids = [f"GPU-{uuid.uuid4()}" for _ in range(3)]
    with claimed(uuids, count=2, at_once=2) as first:
        assert list(first) == uuids[:2]
        with claimed(uuids, count=1, at_once=1) as second:
            assert list(second) == uuids[2:]
        with pytest.raises(GpusBusy, match="found 1 of 2 free GPUs"), claimed(uuids, 2, 2):
            pass
    with claimed(uuids, count=1, at_once=3) as third:
        assert list(third) == uuids[:1]


def test_a_gpu_that_ranks_share_is_not_free() -> None:
    uuids = [f"GPU-{uuid.uuid4()}" for _ in range(2)]
    with claimed(uuids, 1, 1, lambda: {uuids[0]}) as found:
        assert list(found) == uuids[1:]
        assert [is_claimed(each) for each in uuids] == [False, True]
    with pytest.raises(GpusBusy, match="found 1 of 2"), claimed(uuids, 2, 2, lambda: {uuids[0]}):
        pass


def test_what_is_in_use_is_measured_as_far_as_nvidia_smi_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert measure_gpus() == ({}, {})
    free = f"{A}, 8000\\n{B}, [N/A]\\nno devices\\n"
    show_use(tmp_path, [A, B], free, f"0, {A}, 500\\n18, {A}, [N/A]\\n")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/usr/bin{os.pathsep}/bin")
    assert measure_gpus() == ({A: 8000}, {("", A): 500})
    write_nvidia_smi(tmp_path, "exit 9")
    assert measure_gpus() == ({}, {})
