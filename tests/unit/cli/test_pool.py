"""An audit says one thing, in a sentence and in its exit code."""

import pytest

from cli.pool import counted, verdict_of

WHOLE = {"epoch": 0, "exactly_once": True}
PART = {"epoch": 0, "exactly_once": None}
LATER_PART = {"epoch": 7, "exactly_once": None}


@pytest.mark.parametrize(
    ("mode", "status", "exactly_once", "epochs", "sentence", "code"),
    [
        ("synchronous", "COMPLETED", True, [WHOLE], "a read every sample exactly once", 0),
        ("synchronous", "RUNNING", False, [], "a did NOT read every sample exactly once", 1),
        (
            "independent",
            "COMPLETED",
            None,
            [],
            "a trains its ranks independently: there is nothing to audit",
            2,
        ),
        (
            "synchronous",
            "RUNNING",
            None,
            [PART],
            "a is RUNNING: no whole epoch is durable yet, ask again",
            2,
        ),
        (
            "synchronous",
            "RUNNING",
            None,
            [LATER_PART],
            (
                "a is RUNNING: every whole epoch that is durable was read exactly once, "
                "and more are to come, ask again"
            ),
            2,
        ),
        (
            "synchronous",
            "FAILED",
            None,
            [PART],
            "a is FAILED, before its end: no whole epoch is durable",
            2,
        ),
    ],
)
def test_an_audit_ends_with_one_sentence_and_its_exit_code(
    mode: str,
    status: str,
    exactly_once: bool | None,  # noqa: FBT001  as the API says it
    epochs: list[dict[str, bool | None]],
    sentence: str,
    code: int,
) -> None:
    job = {
        "job_id": "a",
        "status": status,
        "is_terminal": status in {"COMPLETED", "FAILED"},
        "spec": {"mode": mode},
    }
    audit = {"exactly_once": exactly_once, "epochs": epochs}
    assert verdict_of(job, audit) == (sentence, code)


def test_one_rank_is_one() -> None:
    assert [counted(ranks) for ranks in (1, 2)] == ["1 rank", "2 ranks"]
