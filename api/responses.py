"""How OpenAPI shows that a route refuses: each status it answers itself, as a problem document."""

from http import HTTPStatus
from typing import Any, Final

from api.problems import MEDIA_TYPE

Responses = dict[int | str, dict[str, Any]]

_CONTENT: Final = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemView"}}}

ANY: Final[Responses] = {
    "4XX": {"description": "Why the request was not answered.", "content": _CONTENT},
    "5XX": {"description": "Why the service cannot answer now.", "content": _CONTENT},
}
"""What every route may answer: the door and the store refuse for all of them."""

UNCHANGED: Final[Responses] = {
    HTTPStatus.NOT_MODIFIED: {"description": "The answer that `If-None-Match` names still holds."}
}


def refusals(*statuses: HTTPStatus) -> Responses:
    """Return the responses of a route that refuses with `statuses`."""
    return {
        status.value: {"description": status.phrase, "content": _CONTENT} for status in statuses
    }
