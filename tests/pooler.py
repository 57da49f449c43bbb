"""Debian's PgBouncer in transaction mode between a test and its server."""

import os
import pwd
import signal
import socket
import subprocess
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import psycopg
import pytest
from sqlalchemy import URL, make_url

__all__ = ["Pooler", "require_pgbouncer"]

PROGRAM = Path("/usr/sbin/pgbouncer")
PATIENCE = 20.0

_SETTINGS = """
[databases]
* = host={host} port={port}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {listen_port}
unix_socket_dir =
auth_type = trust
auth_file = {folder}/users
admin_users = {user}
pool_mode = transaction
default_pool_size = {pool_size}
max_client_conn = 200
logfile = {folder}/log
"""


def require_pgbouncer() -> None:
    """Skip the test where there is no PgBouncer, unless somebody insists on it."""
    if PROGRAM.exists():
        return
    reason = f"no {PROGRAM}: apt-get install pgbouncer"
    if os.environ.get("SQLA_JOBS_REQUIRE_PGBOUNCER"):
        pytest.fail(reason)
    pytest.skip(reason)


class Pooler:
    """Runs while the `with` block does; `url` leads through it to the database of `target`.

    `target` is reached over TCP. Trusts everybody on 127.0.0.1, as the embedded server does.
    """

    def __init__(self, target: str | URL, *, pool_size: int = 3) -> None:
        require_pgbouncer()
        self._target = make_url(target)
        self._pool_size = pool_size
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]

    @property
    def url(self) -> URL:
        return self._target.set(drivername="postgresql+psycopg", host="127.0.0.1", port=self.port)

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="sj-pooler-")
        folder = Path(self._folder.name)
        text = _SETTINGS.format(
            host=self._target.host,
            port=self._target.port,
            listen_port=self.port,
            folder=folder,
            user=self._target.username,
            pool_size=self._pool_size,
        )
        (folder / "settings").write_text(text)
        (folder / "users").write_text(f'"{self._target.username}" ""\n')
        self._account: dict[str, Any] = {}
        if os.geteuid() == 0:  # it refuses to run as root
            nobody = pwd.getpwnam("nobody")
            self._account = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
            for path in (folder, *folder.iterdir()):
                os.chown(path, nobody.pw_uid, nobody.pw_gid)
        self._command = [str(PROGRAM), "-q", str(folder / "settings")]
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            self.stop()
        self._folder.cleanup()

    def start(self) -> None:
        """Start it, and return when it accepts connections."""
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            **self._account,
        )
        ends = time.monotonic() + PATIENCE
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                log = Path(self._folder.name, "log")
                said = log.read_text() if log.exists() else "nothing"
                assert self._process.poll() is None, f"pgbouncer ended; it said: {said}"
                assert time.monotonic() < ends, f"pgbouncer did not start; it said: {said}"
            threading.Event().wait(0.01)

    def stop(self) -> None:
        """End it at once, cutting every connection; its clients know nothing of it beforehand."""
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(PATIENCE)

    def show(self, what: str) -> list[dict[str, Any]]:
        """What its own console says: `show("pools")`."""
        url = self.url.set(drivername="postgresql", database="pgbouncer")
        with psycopg.connect(url.render_as_string(hide_password=False), autocommit=True) as console:
            found = console.execute(f"SHOW {what}".encode(), prepare=False)
            names = [column.name for column in found.description or ()]
            return [dict(zip(names, row, strict=True)) for row in found.fetchall()]
