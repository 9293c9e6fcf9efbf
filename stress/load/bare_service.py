"""An empty route served like the API: the baseline for the cost of a request.

``python -m stress.load.bare_service`` prints its port and serves until it is ended.
"""

import logging
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

PATH = "/empty"


@contextmanager
def bare_service() -> Iterator[tuple[int, int]]:
    """Serve in another process; give its pid and its port."""
    process = subprocess.Popen([sys.executable, __file__], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.pid, int(process.stdout.readline())
    finally:
        process.terminate()
        process.communicate()


def main() -> None:
    app = FastAPI()

    @app.get(PATH)
    def empty() -> None:
        return None

    # The same as in api/server.py, without limits.
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        proxy_headers=False,
        server_header=False,
        access_log=False,
        log_config=None,
        log_level=logging.WARNING,
    )
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    print(listener.getsockname()[1], flush=True)
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
