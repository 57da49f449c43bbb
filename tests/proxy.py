"""A network between a test and its server that can be broken: a TCP proxy in a thread of its own.

Breaks what flows, not the sockets' ends: in a black hole both sides still think that they are connected.
"""

import asyncio
import socket
import struct
import threading
from contextlib import suppress
from typing import Literal, Self

from sqlalchemy import URL, make_url

__all__ = ["Mode", "Proxy"]

#: pass: everything; blackhole: nothing arrives, either way; deaf: requests arrive, answers do not;
#: reset: connections are reset, new ones too; slow: everything, late and a few bytes at a time.
Mode = Literal["pass", "blackhole", "deaf", "reset", "slow"]

#: Of a slow network: seconds before a piece goes on, and its length in bytes.
_LATENCY, _PIECE = 0.01, 256


class Proxy:
    """Forwards to the server of a URL while the `with` block runs; `url` leads through it."""

    def __init__(self, target: str) -> None:
        self._target = make_url(target)
        self._mode: Mode = "pass"
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._work, name="proxy", daemon=True)
        self.port = 0
        self.swallowed = 0  # bytes that arrived nowhere

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self.become("reset")
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(10)

    @property
    def url(self) -> URL:
        return self._target.set(drivername="postgresql+psycopg", host="127.0.0.1", port=self.port)

    def become(self, mode: Mode) -> None:
        """From now on; returns when it is so."""
        changed = threading.Event()

        def change() -> None:
            self._mode = mode
            if mode == "reset":
                for writer in list(self._writers):
                    _reset(writer)
            changed.set()

        self._loop.call_soon_threadsafe(change)
        assert changed.wait(10)

    # -- in its thread

    def _work(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        self._ended = asyncio.Event()
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._ended.wait()
        server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._mode == "reset":
            _reset(writer)
            return
        upstream_reader, upstream_writer = await asyncio.open_connection(self._target.host, self._target.port)
        pair = {writer, upstream_writer}
        self._writers |= pair
        try:
            await asyncio.gather(
                self._forward(reader, upstream_writer, answers=False),
                self._forward(upstream_reader, writer, answers=True),
            )
        finally:
            self._writers -= pair
            for each in pair:
                with suppress(Exception):
                    each.close()

    async def _forward(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, answers: bool
    ) -> None:
        with suppress(ConnectionError):
            while some := await reader.read(65536):
                if self._mode == "slow":
                    await self._trickle(some, writer)
                elif self._mode == "pass" or (self._mode == "deaf" and not answers):
                    writer.write(some)
                else:
                    self.swallowed += len(some)
            # a black hole swallows the end of a connection too; whoever waits behind it is told nothing
            if self._mode in ("pass", "slow"):
                writer.close()

    async def _trickle(self, some: bytes, writer: asyncio.StreamWriter) -> None:
        for begin in range(0, len(some), _PIECE):
            if self._mode == "slow":  # healed meanwhile: the rest at once
                await asyncio.sleep(_LATENCY)
            writer.write(some[begin : begin + _PIECE])


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST instead of FIN."""
    with suppress(Exception):
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
