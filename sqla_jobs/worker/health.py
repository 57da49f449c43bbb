"""Probes over HTTP, from a thread of their own; there are none unless an address is given.

Never ask the database: a probe that does restarts every worker when the database is away. They know what
the loop tells them, and notice when it tells nothing any more. No metrics, no payloads, nothing to change.
"""

import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self

from sqla_jobs.errors import ConfigurationError

__all__ = ["Health", "address"]

#: A loop that has not turned for so long is blocked by a handler, or dead.
_SILENT = 30.0


def address(text: str) -> tuple[str, int]:
    """`host:port`, `:port` or `port`; without a host only this machine is served.

    Raises `ConfigurationError`.

    >>> address("9090"), address("0.0.0.0:9090"), address("[::1]:9090")
    (('127.0.0.1', 9090), ('0.0.0.0', 9090), ('::1', 9090))
    """
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or not int(port) < 2**16:
        raise ConfigurationError(f"health_bind {text!r} is no address: write 9090, or 0.0.0.0:9090")
    return host.strip("[]") or "127.0.0.1", int(port)


class _SixServer(ThreadingHTTPServer):
    address_family = socket.AF_INET6


class Health:
    """What the probes answer. The loop writes, the server's threads read.

    `/startupz`: it has started. `/livez` and `/healthz`: its event loop turns. `/readyz`: it has started,
    is not stopping, its last claim was answered, and no loop of it is down. 200 or 503, and why.
    """

    def __init__(self, bind: str) -> None:
        host, port = address(bind)
        self.started = False
        self.stopping = False
        self.claims_fail = False
        self.down: set[str] = set()
        self._beat = time.monotonic()
        health = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                reason = health.reason(self.path.partition("?")[0])
                self.send_response(404 if reason is None else 503 if reason else 200)
                body = b"not found" if reason is None else (reason or "ok").encode()
                self.send_header("Content-Type", "text/plain; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            do_HEAD = do_GET  # noqa: N815 - the name that http.server looks for

            def log_message(self, format: str, *_: object) -> None:  # noqa: A002 - http.server's name
                """Probes come every few seconds."""

        try:
            self._server = (_SixServer if ":" in host else ThreadingHTTPServer)((host, port), Handler)
        except OSError as error:
            raise ConfigurationError(f"health_bind {bind!r} cannot be bound: {error.strerror}") from error
        self.port: int = self._server.server_address[1]

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, name="sqla_jobs health", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def beat(self) -> None:
        """The loop turns."""
        self._beat = time.monotonic()

    def reason(self, path: str) -> str | None:
        """Why the answer is 503; empty for 200; None for a path that there is not."""
        silent = time.monotonic() - self._beat
        live = f"the event loop has not turned for {silent:.0f} s" if silent > _SILENT else ""
        started = "" if self.started else "it has not started yet"
        match path:
            case "/livez" | "/healthz":
                return live
            case "/startupz":
                return started
            case "/readyz" if self.stopping:
                return "it is stopping"
            case "/readyz" if self.claims_fail:
                return "the database does not answer its claims"
            case "/readyz" if self.down:
                return f"down: {', '.join(sorted(self.down))}"
            case "/readyz":
                return started or live
        return None
