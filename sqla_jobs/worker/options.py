"""The options of a worker: flags, environment variables, defaults; and the app they name.

A flag wins over SQLA_JOBS_<FLAG>, that over the names that other tools use (DATABASE_URL, QUEUE_NAME,
WORKER_CONCURRENCY), that over the default.
"""

import argparse
import importlib
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

from sqla_jobs.errors import AppError, ConfigurationError
from sqla_jobs.events import Events
from sqla_jobs.tasks import Jobs, Task
from sqla_jobs.telemetry.logs import FORMATS
from sqla_jobs.worker.engines import database_url
from sqla_jobs.worker.loop import Worker
from sqla_jobs.worker.settings import MODES

__all__ = ["Parser", "add_options", "as_given", "duration", "load_app", "make_worker", "memory", "resolved"]

_SIZES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "": 1.0}


def duration(text: str) -> timedelta:
    """Seconds (`60`), or a number with a unit (`500ms`, `90s`, `5m`, `1h`, `7d`).

    >>> duration("5m")
    datetime.timedelta(seconds=300)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h|d|)", text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration: write 60, 90s or 5m")
    return timedelta(seconds=float(match[1]) * _UNITS[match[2]])


def memory(text: str) -> int:
    """Bytes, or a number with a unit (`512M`, `2G`, `1.5GiB`): powers of 1024.

    >>> memory("512M")
    536870912
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    size = 0 if match is None else int(float(match[1]) * _SIZES[match[2].upper()])
    if match is None or size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an amount of memory: write 512M or 2G")
    return size


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


@dataclass(frozen=True, slots=True)
class _Option:
    flags: tuple[str, ...]
    convert: Callable[[str], Any]
    default: Any
    help: str
    also: tuple[str, ...] = ()  # environment variables besides SQLA_JOBS_<FLAG>
    metavar: str | None = None
    choices: tuple[str, ...] | None = None

    @property
    def name(self) -> str:
        return self.flags[-1].removeprefix("--").replace("-", "_")

    @property
    def variables(self) -> tuple[str, ...]:
        return (f"SQLA_JOBS_{self.name.upper()}", *self.also)


OPTIONS: tuple[_Option, ...] = (
    _Option(("--app",), str, None, "the Jobs of your application, or what returns it", metavar="MODULE:NAME"),
    _Option(
        ("--database-url",),
        str,
        None,
        "default: the engines of your Jobs, then the environment",
        also=("DATABASE_URL",),
        metavar="URL",
    ),
    _Option(
        ("--listen-database-url",),
        str,
        None,
        "a direct way to the same database, for LISTEN alone, when the other one leads through a pooler",
        metavar="URL",
    ),
    _Option(
        ("-q", "--queue"),
        str,
        None,
        "a queue to work; repeat it (default: those of your tasks); the variable takes several: a,b",
        also=("QUEUE_NAME",),
        metavar="NAME",
    ),
    _Option(
        ("-c", "--concurrency"),
        _positive,
        10,
        "attempts at once",
        also=("WORKER_CONCURRENCY",),
        metavar="N",
    ),
    _Option(
        ("--threads",),
        _positive,
        None,
        "of these at most so many in threads (default: as --concurrency)",
        metavar="N",
    ),
    _Option(
        ("--processes",),
        _positive,
        1,
        "so many worker processes, started again when they end",
        metavar="N",
    ),
    _Option(
        ("--lease",),
        duration,
        timedelta(seconds=60),
        "after so long without a sign of life others take a job over",
        metavar="TIME",
    ),
    _Option(
        ("--poll-interval",),
        duration,
        timedelta(seconds=5),
        "look for jobs at least this often",
        metavar="TIME",
    ),
    _Option(
        ("--drain-timeout",),
        duration,
        timedelta(seconds=25),
        "after SIGTERM, time for running jobs to finish",
        metavar="TIME",
    ),
    _Option(
        ("--startup-timeout",),
        duration,
        timedelta(seconds=30),
        "give up when no database answers for so long",
        metavar="TIME",
    ),
    _Option(
        ("--mode",),
        str,
        "continuous",
        "drain: end when nothing is due any more; once: after one claim of each queue",
        choices=MODES,
    ),
    _Option(
        ("--max-jobs",),
        _positive,
        None,
        "end with exit code 7 after so many jobs",
        metavar="N",
    ),
    _Option(
        ("--max-runtime",),
        duration,
        None,
        "end with exit code 7 after so long",
        metavar="TIME",
    ),
    _Option(
        ("--max-memory",),
        memory,
        None,
        "end with exit code 7 when the process uses so much",
        metavar="SIZE",
    ),
    _Option(
        ("--name",),
        str,
        None,
        "first part of the worker's id (default: the host's name)",
        metavar="NAME",
    ),
    _Option(
        ("--log-level",),
        str,
        "info",
        "how much is logged",
        choices=("debug", "info", "warning", "error"),
    ),
    _Option(("--log-format",), str, "text", "how it is logged", choices=FORMATS),
)


class Parser(argparse.ArgumentParser):
    """Exits with 2, and with one sentence."""

    def error(self, message: str) -> NoReturn:
        """A usage error."""
        self.exit(2, f"{self.prog}: {message}\n")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add every option of a worker to `parser`."""
    for option in OPTIONS:
        settings: dict[str, Any] = {"help": _help(option), "default": None}
        if option.choices:
            settings["choices"] = option.choices
        else:
            settings |= {"type": option.convert, "metavar": option.metavar}
        if option.name == "queue":
            settings["action"] = "append"
        parser.add_argument(*option.flags, **settings)
    parser.add_argument("--no-listen", action="store_true", help="poll only [SQLA_JOBS_NO_LISTEN]")
    parser.add_argument(
        "--check", action="store_true", help="only see whether a worker could start: app, database, schema"
    )


def _help(option: _Option) -> str:
    variables = " ".join(option.variables)
    if isinstance(option.default, timedelta):
        return f"{option.help} (default: {option.default.total_seconds():g}s) [{variables}]"
    if option.default is not None:
        return f"{option.help} (default: {option.default}) [{variables}]"
    return f"{option.help} [{variables}]"


def as_given(arguments: argparse.Namespace) -> list[str]:
    """The flags that were given, as text for a process that is to get the same."""
    given: list[str] = ["--no-listen"] if arguments.no_listen else []
    for option in OPTIONS:
        value = getattr(arguments, option.name)
        if value is None:
            continue
        for each in value if isinstance(value, list) else [value]:
            text = f"{each.total_seconds()}s" if isinstance(each, timedelta) else str(each)
            given.append(f"{option.flags[-1]}={text}")
    return given


def resolved(arguments: argparse.Namespace, environment: Mapping[str, str]) -> dict[str, Any]:
    """Every option's value: flag, environment, default. `source` of the database URL beside it.

    Raises `ConfigurationError` for a variable whose value does not fit.
    """
    values: dict[str, Any] = {"database_url_from": "--database-url"}
    for option in OPTIONS:
        given = getattr(arguments, option.name)
        if given is not None:
            values[option.name] = given
            continue
        values[option.name] = option.default
        for variable in option.variables:
            text = environment.get(variable)
            if not text:
                continue
            values[option.name] = _from_environment(option, variable, text)
            if option.name == "database_url":
                values["database_url_from"] = variable
            break
    no_listen = environment.get("SQLA_JOBS_NO_LISTEN", "").lower() in {"1", "true", "yes", "on"}
    values["no_listen"] = arguments.no_listen or no_listen
    return values


def _from_environment(option: _Option, variable: str, text: str) -> Any:
    if option.name == "queue":
        return [name for name in text.split(",") if name]
    if option.choices and text not in option.choices:
        raise ConfigurationError(f"{variable} must be one of {', '.join(option.choices)}, got {text!r}")
    try:
        return option.convert(text)
    except argparse.ArgumentTypeError as error:
        raise ConfigurationError(f"{variable}: {error}") from None


def load_app(name: str | None) -> Jobs:
    """The Jobs that `module:name` names, or that the function there returns.

    Raises `AppError` when it cannot be imported or is no Jobs.
    """
    if not name:
        raise AppError("name your application: --app app.tasks:jobs, or SQLA_JOBS_APP")
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise AppError(f"--app {name!r} must look like app.tasks:jobs (module, colon, name)")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as python -m does; a console script does not
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        raise AppError(
            f"--app {name!r} cannot be imported: {type(error).__name__}: {error} "
            f"({where.filename}, line {where.lineno})"
        ) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise AppError(f"--app {name!r}: {module_name} has no {attribute}")
        found = getattr(found, part)
    if isinstance(found, Task):
        raise AppError(f"--app {name!r} is a task; name the Jobs that it belongs to")
    if callable(found) and not isinstance(found, Jobs):
        try:
            found = found()
        except Exception as error:
            raise AppError(f"--app {name!r} raised {type(error).__name__}: {error}") from error
    if not isinstance(found, Jobs):
        raise AppError(f"--app {name!r} is a {type(found).__name__}, not a Jobs")
    return found


def make_worker(options: Mapping[str, Any], *, events: Events) -> tuple[Worker, str]:
    """The worker that the options describe, and where its database came from, without the password."""
    jobs = load_app(options["app"])
    url = options["database_url"]
    given = url is not None and options["database_url_from"] == "--database-url"
    in_code = jobs.engine if jobs.engine is not None else jobs.async_engine
    if in_code is not None and not given:
        url, source = None, f"{in_code.url.render_as_string()} (engine in code)"
    elif url is not None:
        source = f"{database_url(url).render_as_string()} ({options['database_url_from']})"
    else:
        source = "none"
    worker = Worker(
        jobs,
        url=url,
        listen_url=options["listen_database_url"],
        queues=options["queue"],
        concurrency=options["concurrency"],
        threads=options["threads"],
        lease=options["lease"],
        poll_interval=options["poll_interval"],
        drain_timeout=options["drain_timeout"],
        startup_timeout=options["startup_timeout"],
        listen=not options["no_listen"],
        mode=options["mode"],
        max_jobs=options["max_jobs"],
        max_runtime=options["max_runtime"],
        max_memory=options["max_memory"],
        name=options["name"],
        events=events,
    )
    return worker, source
