"""Where a job is in the API."""

from urllib.parse import quote


def path_of(job_id: str, *rest: str) -> str:
    """Return the path of a job, or of something below it."""
    return "/".join(["/jobs", quote(job_id, safe=""), *rest])
