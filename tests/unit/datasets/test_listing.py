from pathlib import Path

import pytest

from muster.datasets.errors import DatasetEmpty, DatasetMissing, ShardUnreadable
from muster.datasets.listing import find_shards, shard_name, sorted_shard_names


def test_shards_are_listed_by_name_and_nothing_else_is(tmp_path: Path) -> None:
    for name in ("shard_00010.txt", "shard_00002.txt", "shard_00001.idx", "test.jsonl", "x.txt"):
        (tmp_path / name).write_text("{}\n")
    assert [path.name for path in find_shards(tmp_path)] == ["shard_00002.txt", "shard_00010.txt"]


def test_names_made_here_sort_in_the_order_of_their_numbers() -> None:
    names = [shard_name(number) for number in (0, 9, 10, 99_999)]
    assert sorted_shard_names(reversed(names)) == names


def test_unfinished_files_are_no_shards() -> None:
    assert sorted_shard_names([".shard_00000.txt.ab12.tmp", "shard_.txt", "ashard_1.txt"]) == []


def test_a_missing_directory_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(DatasetMissing, match=r"does not exist: .*muster dataset digits --out .*no"):
        find_shards(tmp_path / "no")


def test_a_file_is_no_data_set(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(DatasetMissing, match="is no directory"):
        find_shards(file)


def test_a_directory_without_shards_is_empty(tmp_path: Path) -> None:
    with pytest.raises(DatasetEmpty, match=r"holds no shard file.*muster dataset digits"):
        find_shards(tmp_path)


def test_shards_without_a_line_are_an_empty_data_set_but_one_line_is_enough(tmp_path: Path) -> None:
    (tmp_path / "shard_00000.txt").touch()
    (tmp_path / "shard_00001.txt").touch()
    with pytest.raises(DatasetEmpty, match="2 shards and not one line"):
        find_shards(tmp_path)
    (tmp_path / "shard_00002.txt").write_text("x")
    assert len(find_shards(tmp_path)) == 3


def test_a_dangling_link_is_an_error_and_not_a_shard_less(tmp_path: Path) -> None:
    (tmp_path / "shard_00000.txt").symlink_to(tmp_path / "gone")
    with pytest.raises(ShardUnreadable, match="shard_00000"):
        find_shards(tmp_path)
