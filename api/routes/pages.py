"""Pages for people: what ``GET /`` and ``GET /docs`` show, made from the OpenAPI document.

They have no script and their policy allows none: a script of this origin could submit jobs.
"""

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any, Final

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.dependencies import READ

_STYLE: Final = Path(__file__).with_suffix(".css").read_text()

_POLICY: Final = (
    "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; style-src "
    f"'sha256-{base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()}'"
)

router = APIRouter(include_in_schema=False, dependencies=[READ])


@router.get("/")
def get_index(request: Request) -> Response:
    """Return links to what can be read: as a page for a browser, as JSON for other clients."""
    document = request.app.openapi()
    links = {
        path: methods["get"]["summary"]
        for path, methods in sorted(document["paths"].items(), key=lambda it: "job" not in it[0])
        if "get" in methods and "{" not in path
    } | {"/docs": "This interface, explained", "/openapi.json": "The same for programs"}
    if "text/html" in request.headers.get("accept", ""):
        rows = [[_link(path, path), _text(text)] for path, text in links.items()]
        return _page(document, _table("", rows))
    index = {"service": "muster", "version": document["info"]["version"], "links": links}
    return Response(json.dumps(index), headers={"Vary": "Accept"}, media_type="application/json")


@router.get("/docs")
def get_docs(request: Request) -> Response:
    """Return the OpenAPI document as a page."""
    document = request.app.openapi()
    sections: dict[str, str] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            tag = operation["tags"][0]
            sections[tag] = sections.get(tag, "") + _operation(method, path, operation)
    schemas = document["components"]["schemas"]
    sections["documents"] = "".join(_schema(name, schemas[name]) for name in schemas)
    return _page(document, "".join(f"<h2>{escape(tag)}</h2>{sections[tag]}" for tag in sections))


def _page(document: dict[str, Any], content: str) -> Response:
    html = (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Muster</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style>'
        f"<h1>{_link('/', 'Muster')} <small>{escape(document['info']['version'])}</small></h1>"
    )
    headers = {"Content-Security-Policy": _POLICY, "Vary": "Accept"}
    return Response(html + content, headers=headers, media_type="text/html")


def _operation(method: str, path: str, operation: dict[str, Any]) -> str:
    parts = operation.get("parameters", [])
    if body := operation.get("requestBody"):
        parts = [*parts, {"name": "", "in": "body", **body["content"]["application/json"]}]
    rows = [[_code(part["name"]), escape(part["in"]), *_facts(part)] for part in parts]
    scopes = "".join(_code(need["token"][0]) for need in operation.get("security", []))
    answers = [
        [_code(code), _type({"anyOf": [*it.get("content", {}).values()]}), _text(it["description"])]
        for code, it in sorted(operation["responses"].items())
    ]
    return _details(
        "",
        f'<b class="{escape(method)}">{escape(method.upper())}</b>{_code(path)}'
        f"{_text(operation['summary'])}",
        operation,
        f"<p>Needs a token of scope {scopes}.</p>" if scopes else "",
        _table("parameter in type default meaning", rows),
        _table("answer document meaning", answers),
    )


def _schema(name: str, schema: dict[str, Any]) -> str:
    fields = [[_code(field), *_facts(it)] for field, it in schema.get("properties", {}).items()]
    examples = "".join(f"<pre>{escape(json.dumps(it))}</pre>" for it in schema.get("examples", []))
    table = _table("field type default meaning", fields)
    return _details(f' open id="{escape(name)}"', _code(name), schema, examples, table)


def _details(attributes: str, head: str, part: dict[str, Any], *content: str) -> str:
    text = f"<summary>{head}</summary><p>{_text(part.get('description', ''))}</p>"
    return f"<details{attributes}>{text}{''.join(content)}</details>"


def _facts(part: dict[str, Any]) -> list[str]:
    """Return type, default and meaning."""
    schema = part.get("schema", part)
    default = _code(json.dumps(schema["default"])) if "default" in schema else ""
    return [_type(schema), default, _text(part.get("description", ""))]


def _type(schema: dict[str, Any]) -> str:
    match schema:
        case {"$ref": reference}:
            name = reference.rpartition("/")[2]
            return _link(f"#{name}", name)
        case {"schema": kind}:
            return _type(kind)
        case {"anyOf": kinds}:
            return " or ".join(map(_type, kinds))
        case {"enum": words}:
            return " | ".join(map(_code, words))
        case {"items": item}:
            return f"list of {_type(item)}"
        case {"additionalProperties": dict(item)}:
            return f"names to {_type(item)}"
        case {"type": kind, "minimum": low, "maximum": high}:
            return escape(f"{kind}, {low:,} to {high:,}")
        case _:
            return escape(schema.get("type", ""))


def _code(text: str) -> str:
    return f"<code>{escape(text)}</code>"


def _link(target: str, text: str) -> str:
    return f'<a href="{escape(target)}">{escape(text)}</a>'


def _text(text: str) -> str:
    """Return text with `words` in backticks as code, and blank lines as breaks."""
    return re.sub(r"`+([^`]+)`+", r"<code>\1</code>", escape(text)).replace("\n\n", "<br><br>")


def _table(head: str, rows: Sequence[Sequence[str]]) -> str:
    """Return a table; the cells are HTML."""
    lines = "".join(f"<tr><td>{'</td><td>'.join(row)}</td></tr>" for row in rows)
    heading = "".join(f"<th>{word}</th>" for word in head.split())
    return f"<table><tr>{heading}</tr>{lines}</table>" if rows else ""
