"""Locations: what users write, and what is refused."""

from pathlib import Path

import pytest

from muster.contracts.location import InvalidLocation, S3Location, expand_home, parse_location

HERE = Path("/here")


@pytest.mark.parametrize(
    ("text", "location"),
    [
        ("data", HERE / "data"),
        ("/data/shards", Path("/data/shards")),
        ("s3data/x", HERE / "s3data/x"),
        ("a:b", HERE / "a:b"),
        ("s3://bucket", S3Location("bucket")),
        ("s3://bucket/", S3Location("bucket")),
        ("s3://my.bucket-1/a/b/", S3Location("my.bucket-1", "a/b")),
    ],
)
def test_location_is_parsed(text: str, location: object) -> None:
    assert parse_location(text, HERE) == location


OTHER = """
s3:/b s3:// s3:///x gs://b/x S3://bucket s3://B/x s3://ab/x file:/x s3://bucket//x s3://bucket/a//b
s3://bucket/../x s3://bucket/a/. s3://a!b/x /home/me/s3:/b
"""


@pytest.mark.parametrize("text", OTHER.split())
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(InvalidLocation):
        parse_location(text, HERE)


def test_home_is_expanded_as_by_a_shell() -> None:
    home = str(Path.home())
    assert [expand_home(it) for it in ("~", "~/a/b", "/a/~", "./~", "s3://bucket/~", "")] == [
        *(home, f"{home}/a/b"),
        *("/a/~", "./~", "s3://bucket/~", ""),
    ]
    with pytest.raises(InvalidLocation, match=r"'~no-one/a' names the home of an unknown user"):
        expand_home("~no-one/a")


def test_parts_join_and_split_like_a_path() -> None:
    location = S3Location("bucket") / "a" / "b"
    assert (str(location), location.name, location.parent) == (
        "s3://bucket/a/b",
        "b",
        S3Location("bucket", "a"),
    )
    assert parse_location(str(location)) == location
    assert str(S3Location("bucket")) == "s3://bucket"
