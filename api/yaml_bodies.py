"""Bodies in YAML: the file in which a person keeps a job can be sent as it is.

Such a body is made JSON before anybody else sees it, so whatever holds for JSON holds for it. YAML
can say more than that in few words: with aliases some lines become gigabytes, so they are refused.
"""

import json
from datetime import date
from http import HTTPStatus
from typing import Final

import yaml
from anyio.to_thread import run_sync
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.account import CHANGING, legible
from api.announcement import media_type
from api.problems import Problem, respond
from muster.plain_yaml import plain

YAML_TYPES: Final = frozenset({"application/yaml", "application/x-yaml", "text/yaml"})

LIMIT_BYTES: Final = 1 << 16
DEPTH_LIMIT: Final = 50
"""What is in a job is in few brackets; who reads thousands of them runs out of stack."""

VALUES_LIMIT: Final = 4096
"""Names and values; the largest job has fewer.

Each costs some microseconds, as a byte does not: `{a,a,a` is thirty thousand of them.
"""

_TEXT_TAG: Final = "tag:yaml.org,2002:str"

_LOADER: Final = plain(getattr(yaml, "CSafeLoader", yaml.SafeLoader))


class YamlAsJson:
    """Lets an application that knows JSON alone be spoken to in YAML."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] != "http"
            or scope["method"] not in CHANGING  # what only looks has no body
            or media_type(Headers(scope=scope)) not in YAML_TYPES
        ):
            await self._app(scope, receive, send)
            return
        try:
            body = await run_sync(as_json, await _whole(Request(scope, receive)))
        except ClientDisconnect:
            return  # nobody waits for an answer
        except Problem as problem:
            await respond(problem, scope)(scope, receive, send)
            return
        await self._app(_of_json(scope, body), _said_once(body, receive), send)


def as_json(text: bytes) -> bytes:
    """Return what `text` says as JSON; raises `Problem`."""
    try:
        _refuse_riddles(text)
        return json.dumps(_value(text), default=_text_of_date).encode()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        said = ", ".join(part for part in (error.context, error.problem) if part)
        raise _no_yaml(f"{_shown(said)}{where}") from error
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise _no_yaml(_shown(str(error))) from error
    except Problem:
        raise
    except Exception as error:
        # PyYAML's constructors raise whatever befalls them: KeyError for `!!bool perhaps`.
        raise _no_yaml("a value is not what its tag says") from error


def _shown(said: str) -> str:
    """Return what a reader of YAML says; it repeats tags and values, of any length."""
    return legible(" ".join(said.split()))


def _value(text: bytes) -> object:
    loader = _LOADER(text)
    try:
        node = loader.get_single_node()
        _refuse_lost(node)
        return None if node is None else loader.construct_document(node)
    finally:
        loader.dispose()


def _text_of_date(value: object) -> str:
    """Return a date as it was written, more or less; nothing else of YAML's own has a word."""
    if isinstance(value, date):
        return str(value)
    raise TypeError(f"write it as text, JSON has no {type(value).__name__}")


def _refuse_riddles(text: bytes) -> None:
    """Raise for what is long to read, or to be told: before any of it is kept."""
    depth = values = 0
    for event in yaml.parse(text, _LOADER):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        values += isinstance(event, yaml.NodeEvent)
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent) or depth > DEPTH_LIMIT:
            raise _no_yaml(f"write aliases out, and nest no deeper than {DEPTH_LIMIT}: line {line}")
        if values > VALUES_LIMIT:
            raise _too_large(f"{VALUES_LIMIT} names and values")


def _refuse_lost(node: yaml.Node | None) -> None:
    """Raise for a name that would not arrive as it is written: `on` as true, `a` as a later one.

    What a name is stays unsaid: it is the client's word, of any length and in any letters.
    """
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _refuse_lost(item)
    elif isinstance(node, yaml.MappingNode):
        seen = set[str]()
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag != _TEXT_TAG:
                raise _wrong_name("a name is no text: put it in quotes", key)
            if key.value in seen:
                raise _wrong_name("a name is given twice", key)
            seen.add(key.value)
            _refuse_lost(value)


def _wrong_name(why: str, key: yaml.Node) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=why, problem_mark=key.start_mark)


async def _whole(request: Request) -> bytes:
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > LIMIT_BYTES:
            raise _too_large(f"{LIMIT_BYTES} bytes")
    return body


def _of_json(scope: Scope, body: bytes) -> Scope:
    told = {b"content-type", b"content-length", b"transfer-encoding"}
    headers = [(name, value) for name, value in scope["headers"] if name not in told]
    length = (b"content-length", str(len(body)).encode())
    return {**scope, "headers": [*headers, (b"content-type", b"application/json"), length]}


def _said_once(body: bytes, receive: Receive) -> Receive:
    said: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receiving() -> Message:
        return said.pop() if said else await receive()

    return receiving


def _no_yaml(why: str) -> Problem:
    return Problem(HTTPStatus.UNPROCESSABLE_ENTITY, "invalid-yaml", f"This body is no YAML: {why}.")


def _too_large(most: str) -> Problem:
    return Problem(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        "body-too-large",
        f"A body in YAML has {most} at most: send JSON.",
    )
