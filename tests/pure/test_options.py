"""What the command line and the environment make of a worker."""

import argparse
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from sqla_jobs.errors import AppError, ConfigurationError
from sqla_jobs.events import Events
from sqla_jobs.tasks import Jobs
from sqla_jobs.worker.engines import database_url
from sqla_jobs.worker.options import (
    OPTIONS,
    Parser,
    add_options,
    as_given,
    duration,
    load_app,
    make_worker,
    memory,
    resolved,
)


def options(*arguments: str, **environment: str) -> dict[str, object]:
    """As a worker would see them."""
    parser = Parser(prog="worker")
    add_options(parser)
    return resolved(parser.parse_args(arguments), environment)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("60", 60), ("90s", 90), ("5m", 300), ("1h", 3600), ("7d", 604800), ("500ms", 0.5), ("1.5s", 1.5)],
)
def test_a_duration_is_seconds_or_has_a_unit(text: str, seconds: float) -> None:
    assert duration(text) == timedelta(seconds=seconds)


@pytest.mark.parametrize("text", ["", "x", "-1", "5 minutes", "1e3", "m"])
def test_what_is_no_duration_is_refused_with_examples(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="write 60, 90s or 5m"):
        duration(text)


def test_the_defaults_are_those_of_the_documentation() -> None:
    assert options() == {
        "app": None,
        "database_url": None,
        "database_url_from": "--database-url",
        "listen_database_url": None,
        "queue": None,
        "concurrency": 10,
        "threads": None,
        "processes": 1,
        "health_bind": None,
        "max_jobs": None,
        "max_runtime": None,
        "max_memory": None,
        "lease": timedelta(seconds=60),
        "poll_interval": timedelta(seconds=5),
        "drain_timeout": timedelta(seconds=25),
        "startup_timeout": timedelta(seconds=30),
        "mode": "continuous",
        "name": None,
        "log_level": "info",
        "log_format": "text",
        "no_listen": False,
    }


def test_a_flag_wins_over_our_variable_and_ours_over_that_of_others() -> None:
    environment = {
        "SQLA_JOBS_CONCURRENCY": "3",
        "WORKER_CONCURRENCY": "4",
        "DATABASE_URL": "postgresql://theirs",
        "SQLA_JOBS_DATABASE_URL": "postgresql://ours",
        "QUEUE_NAME": "mail,reports",
        "SQLA_JOBS_LEASE": "2m",
        "SQLA_JOBS_NO_LISTEN": "1",
    }

    from_environment = options(**environment)
    from_flags = options(
        "-c", "7", "-q", "a", "-q", "b", "--database-url", "postgresql://flag", **environment
    )

    assert from_environment["concurrency"] == 3
    assert from_environment["database_url"] == "postgresql://ours"
    assert from_environment["database_url_from"] == "SQLA_JOBS_DATABASE_URL"
    assert from_environment["queue"] == ["mail", "reports"]
    assert from_environment["lease"] == timedelta(minutes=2)
    assert from_environment["no_listen"] is True
    assert from_flags["concurrency"] == 7
    assert from_flags["queue"] == ["a", "b"]
    assert from_flags["database_url"] == "postgresql://flag"
    assert from_flags["database_url_from"] == "--database-url"


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("SQLA_JOBS_CONCURRENCY", "0", "SQLA_JOBS_CONCURRENCY: '0' is not a whole number of 1 or more"),
        ("WORKER_CONCURRENCY", "ten", "WORKER_CONCURRENCY: 'ten' is not"),
        ("SQLA_JOBS_MODE", "ever", "SQLA_JOBS_MODE must be one of continuous, drain, once, got 'ever'"),
        ("SQLA_JOBS_LEASE", "soon", "SQLA_JOBS_LEASE: 'soon' is not a duration"),
    ],
)
def test_a_variable_that_does_not_fit_is_refused_by_its_name(variable: str, value: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        options(**{variable: value})


def test_a_child_process_is_given_what_its_supervisor_was_given() -> None:
    given = [
        *("--app", "app.tasks:jobs", "-q", "with space", "-q", "b", "-c", "7", "--threads=3", "--no-listen"),
        *("--lease", "1.5m", "--poll-interval", "300ms", "--mode", "drain", "--max-jobs", "9", "--name=-odd"),
        *("--max-memory", "512M", "--max-runtime", "2h", "--log-level", "debug", "--processes", "2"),
        *("--database-url", "postgresql://u:p%3D@h/d"),
    ]
    parser = Parser(prog="worker")
    add_options(parser)
    arguments = parser.parse_args(given)

    again = parser.parse_args(as_given(arguments))

    assert vars(again) == vars(arguments)
    assert "--max-memory=536870912" in as_given(arguments)


@pytest.mark.parametrize(
    ("text", "size"),
    [("1048576", 2**20), ("512M", 2**29), ("2G", 2**31), ("1.5GiB", 3 * 2**29), ("64 kb", 2**16)],
)
def test_an_amount_of_memory_is_bytes_or_has_a_unit(text: str, size: int) -> None:
    assert memory(text) == size


@pytest.mark.parametrize("text", ["", "0", "much", "-5M", "5T", "0.1"])
def test_what_is_no_amount_of_memory_is_refused_with_examples(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="write 512M or 2G"):
        memory(text)


def test_every_option_names_its_variable_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        options("--help")

    text = capsys.readouterr().out
    assert ended.value.code == 0
    for option in OPTIONS:
        assert option.flags[-1] in text
        assert option.variables[0] in text


@pytest.mark.parametrize(
    ("given", "drivername"),
    [
        ("postgres://u@h/d", "postgresql+psycopg"),
        ("postgresql://u@h/d", "postgresql+psycopg"),
        ("postgresql+asyncpg://u@h/d", "postgresql+psycopg"),
        ("postgresql+psycopg://u@h/d?sslmode=require", "postgresql+psycopg"),
    ],
)
def test_every_spelling_of_a_postgresql_url_is_taken(given: str, drivername: str) -> None:
    url = database_url(given)

    assert url.drivername == drivername
    assert (url.username, url.host, url.database) == ("u", "h", "d")


def test_a_url_that_cannot_be_parsed_is_not_repeated() -> None:
    with pytest.raises(ConfigurationError) as refused:
        database_url("user:secret@host")

    assert "secret" not in str(refused.value)


def test_an_app_may_be_a_function_that_returns_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "factory_app.py").write_text(
        "from sqla_jobs import Jobs\nmade = []\ndef create():\n    made.append(Jobs())\n    return made[0]\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(tmp_path)

    found = load_app("factory_app:create")

    assert isinstance(found, Jobs)
    assert sys.modules["factory_app"].made == [found]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (None, "SQLA_JOBS_APP"),
        ("shop", "must look like app.tasks:jobs"),
        (":jobs", "must look like app.tasks:jobs"),
        ("no.such:jobs", "cannot be imported: ModuleNotFoundError"),
        ("shop:orders", "shop has no orders"),
        ("shop:Order", "is a Order, not a Jobs"),
        ("shop:put", "raised TypeError"),
    ],
)
def test_an_app_that_is_none_says_what_is_wrong(name: str | None, message: str) -> None:
    with pytest.raises(AppError, match=message):
        load_app(name)


def test_a_worker_takes_its_options_and_says_where_its_database_came_from() -> None:
    given = options(
        "--app",
        "shop:jobs",
        "-q",
        "mail",
        "-c",
        "3",
        "--name",
        "w",
        "--database-url",
        "postgresql://u:secret@h/d",
    )

    worker, source = make_worker(given, events=Events())

    assert worker.queues == ("mail",)
    assert worker.concurrency == 3
    assert worker.id.startswith("w:")
    assert source == "postgresql+psycopg://u:***@h/d (--database-url)"


def test_two_workers_of_one_process_never_have_the_same_id() -> None:
    given = options("--app", "shop:jobs", "--database-url", "postgresql://h/d")

    ids = {make_worker(given, events=Events())[0].id for _ in range(100)}

    assert len(ids) == 100
