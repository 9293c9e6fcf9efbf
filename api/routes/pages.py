"""Pages for people: what ``GET /`` and ``GET /docs`` show, made from the OpenAPI document.

They have no script and their policy allows none: a script of this origin could submit jobs.
"""

import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.dependencies import READ

if TYPE_CHECKING:
    from jinja2 import Template

_POLICY: Final = (
    "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "style-src 'unsafe-inline'"
)

router = APIRouter(include_in_schema=False, dependencies=[READ])


@router.get("/")
def get_index(request: Request) -> Response:
    """Return a page of links to what can be read."""
    document = request.app.openapi()
    links = {
        path: methods["get"]["summary"]
        for path, methods in sorted(document["paths"].items(), key=lambda it: "job" not in it[0])
        if "get" in methods and "{" not in path
    } | {"/docs": "This interface, explained", "/openapi.json": "The same for programs"}
    return _page(document, links)


@router.get("/docs")
def get_docs(request: Request) -> Response:
    """Return the OpenAPI document as a page."""
    return _page(request.app.openapi(), {})


def _page(document: dict[str, Any], links: dict[str, str]) -> Response:
    html = _template().render(document=document, links=links)
    return Response(html, headers={"Content-Security-Policy": _POLICY}, media_type="text/html")


@cache
def _template() -> "Template":
    from jinja2 import Environment, FileSystemLoader  # noqa: PLC0415  takes 50 ms
    from markupsafe import Markup, escape  # noqa: PLC0415

    def words(text: str) -> Markup:
        """Return text with `words` in backticks as code, and blank lines as breaks."""
        html = re.sub(r"`+([^`]+)`+", r"<code>\1</code>", str(escape(text)))
        return Markup(html.replace("\n\n", "<br><br>"))  # noqa: S704  it is escaped

    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["words"] = words
    return environment.get_template("pages.html")
