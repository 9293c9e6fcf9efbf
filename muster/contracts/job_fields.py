"""The fields of a job for editors, derived from `JobRequest`."""

from typing import Any, Final

import msgspec

from muster.contracts.spec import JobRequest

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"


def job_schema() -> dict[str, Any]:
    """Return the JSON schema of a job file."""
    schema = msgspec.json.schema(JobRequest)["$defs"][JobRequest.__name__]
    return {
        **schema,
        "$schema": DIALECT,
        "title": "A job of Muster",
        "description": "As muster submit reads it: relative paths, and ~, are those of the user "
        "who submits it.",
    }
