"""Pages for people: what ``GET /`` and ``GET /docs`` show, made from the OpenAPI document.

They have no script and their policy allows none: a script of this origin could submit jobs.
"""

import json
import re
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any, Final

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.dependencies import READ

_STYLE: Final = Path(__file__).with_suffix(".css").read_text()

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
    return _page(document, _table([_link(path, path), _text(links[path])] for path in links))


@router.get("/docs")
def get_docs(request: Request) -> Response:
    """Return the OpenAPI document as a page."""
    document = request.app.openapi()
    content = "<h2>operations</h2>"
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            content += _operation(method, path, operation)
    content += "<h2>documents</h2>"
    for name, schema in document["components"]["schemas"].items():
        content += f'<details open id="{escape(name)}"><summary>{_code(name)}</summary>'
        content += f"<p>{_text(schema.get('description', ''))}</p>"
        content += _table(_row(*field) for field in schema.get("properties", {}).items())
        content += "</details>"
    return _page(document, content)


def _page(document: dict[str, Any], content: str) -> Response:
    html = (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Muster</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style>'
        f"<h1>{_link('/', 'Muster')} <small>{escape(document['info']['version'])}</small></h1>"
    )
    headers = {"Content-Security-Policy": _POLICY}
    return Response(html + content, headers=headers, media_type="text/html")


def _operation(method: str, path: str, operation: dict[str, Any]) -> str:
    scopes = " ".join(need["token"][0] for need in operation.get("security", []))
    rows = [_row(f"{it['name']} ({it['in']})", it) for it in operation.get("parameters", [])]
    if body := operation.get("requestBody"):
        rows.append(_row("body", body["content"]["application/json"]))
    for code, answer in sorted(operation["responses"].items()):
        documents = " or ".join(map(_type, answer.get("content", {}).values()))
        rows.append([_code(code), documents, _text(answer["description"])])
    return (
        f'<details><summary><b class="{escape(method)}">{escape(method.upper())}</b>{_code(path)}'
        f"{_text(operation['summary'])}</summary><p>{_text(operation.get('description', ''))}</p>"
        f"<p>Scope of the token: {escape(scopes or 'any')}.</p>{_table(rows)}</details>"
    )


def _row(name: str, part: dict[str, Any]) -> list[str]:
    """Return name, type with default, and meaning of a parameter or field, as HTML."""
    schema = part.get("schema", part)
    default = f" = {_code(json.dumps(schema['default']))}" if "default" in schema else ""
    return [_code(name), _type(schema) + default, _text(part.get("description", ""))]


def _type(part: dict[str, Any]) -> str:
    match part.get("schema", part):
        case {"$ref": reference}:
            name = reference.rpartition("/")[2]
            return _link(f"#{name}", name)
        case {"anyOf": kinds}:
            return " or ".join(map(_type, kinds))
        case {"items": item}:
            return f"list of {_type(item)}"
        case schema:
            return escape(" | ".join(schema.get("enum", [])) or schema.get("type", ""))


def _code(text: str) -> str:
    return f"<code>{escape(text)}</code>"


def _link(target: str, text: str) -> str:
    return f'<a href="{escape(target)}">{escape(text)}</a>'


def _text(text: str) -> str:
    """Return text with `words` in backticks as code, and blank lines as breaks."""
    return re.sub(r"`+([^`]+)`+", r"<code>\1</code>", escape(text)).replace("\n\n", "<br><br>")


def _table(rows: Iterable[list[str]]) -> str:
    """Return a table; the cells are HTML."""
    lines = "".join(f"<tr><td>{'</td><td>'.join(row)}</td></tr>" for row in rows)
    return f"<table>{lines}</table>"
