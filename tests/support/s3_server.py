"""A store for tests: a moto server in a process of its own, or the one of TEST_S3_ENDPOINT."""

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from muster.contracts.location import S3Location
from muster.objects.client import S3Client, StoreAccess

REGION = "us-east-1"


@contextmanager
def running_store() -> Iterator[StoreAccess]:
    """Use the store of TEST_S3_ENDPOINT, or a server that ends with this process."""
    if endpoint := os.environ.get("TEST_S3_ENDPOINT"):
        yield StoreAccess(endpoint, os.environ["S3_ACCESS_KEY"], os.environ["S3_SECRET_KEY"])
        return
    command = [sys.executable, "-P", "-c", _SERVER]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        port = process.stdout.readline().decode().strip()
        yield StoreAccess(f"http://127.0.0.1:{port}", "testing", "testing")
        process.stdin.close()


def new_bucket(access: StoreAccess) -> S3Location:
    """Create a bucket, and return the location of a prefix in it."""
    import boto3  # noqa: PLC0415  slow

    name = f"muster-{uuid.uuid4().hex}"
    boto3.client(
        "s3",
        endpoint_url=access.endpoint,
        aws_access_key_id=access.access_key,
        aws_secret_access_key=access.secret_key,
        region_name=REGION,
    ).create_bucket(Bucket=name)
    return S3Location(name, "prefix")


def put_files(client: S3Client, location: S3Location, contents: Mapping[str, bytes]) -> None:
    for name, content in contents.items():
        client.put_if_absent(location / name, [memoryview(content)])


_SERVER = """
import os, sys, threading
from werkzeug.serving import make_server
from moto.moto_server import werkzeug_app as moto

# 1.1, or every put would wait a second for "100 Continue" that never comes.
moto.MotoRequestHandler.protocol_version = "HTTP/1.1"
app = moto.DomainDispatcherApplication(moto.create_backend_app)
server = make_server(
    "127.0.0.1", 0, app, threaded=True, request_handler=moto.MotoRequestHandler
)
print(server.port, flush=True)
threading.Thread(target=server.serve_forever, daemon=True).start()
sys.stdin.read()  # until the parent closes it, or is gone
os._exit(0)
"""
