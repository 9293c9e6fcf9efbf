"""A store for tests: a moto server in a process of its own, or the one of TEST_S3_ENDPOINT."""

import atexit
import os
import subprocess
import sys
import uuid
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from muster.contracts.location import S3Location
from muster.contracts.settings.services import S3Settings
from muster.objects.client import S3Client

REGION = "us-east-1"


@cache
def shared_store() -> S3Settings:
    """Return the store of TEST_S3_ENDPOINT, or one server for the rest of this process."""
    if endpoint := os.environ.get("TEST_S3_ENDPOINT"):
        return store_settings(endpoint, os.environ["S3_ACCESS_KEY"], os.environ["S3_SECRET_KEY"])
    return own_server()[0]


@cache
def own_server() -> tuple[S3Settings, int]:
    """Start a server, once, and return its settings and its pid."""
    # It ends with its standard input, so even if this process is killed.
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", _SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    atexit.register(process.communicate)
    assert process.stdout is not None
    port = process.stdout.readline().decode().strip()
    return store_settings(f"http://127.0.0.1:{port}", "testing", "testing"), process.pid


def store_settings(endpoint: str | None, key: str, secret: str) -> S3Settings:
    return S3Settings(endpoint=endpoint, access_key=key, secret_key=secret, cache_dir=Path())


def variables(settings: S3Settings) -> dict[str, str]:
    """Return the environment that describes a store."""
    keys = {"S3_ACCESS_KEY": settings.access_key, "S3_SECRET_KEY": settings.secret_key}
    return {"S3_ENDPOINT": str(settings.endpoint), **{name: str(key) for name, key in keys.items()}}


def new_bucket(access: S3Settings) -> S3Location:
    """Create a bucket, and return the location of a prefix in it."""
    name = f"muster-{uuid.uuid4().hex}"
    bare_client(access).create_bucket(Bucket=name)
    return S3Location(name, "prefix")


@cache
def bare_client(access: S3Settings) -> Any:  # noqa: ANN401  boto3 has no types
    """Return a client of boto3, as boto3 makes it; the same again, as each takes 0.2 s to make."""
    import boto3  # noqa: PLC0415  slow

    return boto3.client(
        "s3",
        endpoint_url=access.endpoint,
        aws_access_key_id=access.access_key,
        aws_secret_access_key=access.secret_key,
        region_name=REGION,
    )


def put_files(client: S3Client, location: S3Location, contents: Mapping[str, bytes]) -> None:
    for name, content in contents.items():
        client.put_if_absent(location / name, [memoryview(content)])


_SERVER = """
import io, os, sys, threading
from werkzeug.serving import make_server
from moto.moto_server import werkzeug_app as moto

# 1.1, or every put would wait a second for "100 Continue" that never comes.
moto.MotoRequestHandler.protocol_version = "HTTP/1.1"
app = moto.DomainDispatcherApplication(moto.create_backend_app)
lock = threading.Lock()

def atomic(environ, start_response):
    # moto checks a condition and writes in two steps, between which another writer may win, too.
    if not {"HTTP_IF_MATCH", "HTTP_IF_NONE_MATCH"} & environ.keys():
        return app(environ, start_response)
    body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    with lock:
        return app({**environ, "wsgi.input": io.BytesIO(body)}, start_response)

server = make_server(
    "127.0.0.1", 0, atomic, threaded=True, request_handler=moto.MotoRequestHandler
)
print(server.port, flush=True)
threading.Thread(target=server.serve_forever, daemon=True).start()
sys.stdin.read()  # until the parent closes it, or is gone
os._exit(0)
"""
