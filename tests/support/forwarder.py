"""A network that can be cut: connections to a port pass through this process.

Stopped by SIGSTOP it answers nothing and closes nothing; what was sent arrives when it goes on.
``python forwarder.py PORT [HOST]`` prints the port at which it listens; it calls from HOST, too.
"""

import asyncio
import sys
from contextlib import closing, suppress


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with closing(writer), suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()


async def main(port: int, host: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(
            "127.0.0.1", port, local_addr=(host, 0)
        )
        await asyncio.gather(copy(reader, far_writer), copy(far_reader, writer))

    server = await asyncio.start_server(serve, host, 0)
    print(server.sockets[0].getsockname()[1], flush=True)  # noqa: T201  the result
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "127.0.0.1"))
