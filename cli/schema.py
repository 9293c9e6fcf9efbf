"""``muster schema``: what a job file may say, for editors."""

import json
from typing import Final

import typer

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"


def schema() -> None:
    """Print the JSON schema of job.yaml.

    Editors complete and check a job file that begins with the line
    # yaml-language-server: $schema=job.schema.json
    after: muster schema > job.schema.json
    """
    from api.requests import JobRequest  # noqa: PLC0415  brings in pydantic

    described = {
        **JobRequest.model_json_schema(),
        "$schema": DIALECT,
        "title": "A job of Muster",
        "description": "As muster submit reads it: relative paths, and ~, are those of whoever "
        "submits it.",
    }
    typer.echo(json.dumps(described, indent=2, ensure_ascii=False))
