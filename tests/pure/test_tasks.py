"""What may be a task, under which kind, and what a task keeps of its function."""

import asyncio
import copy
import functools
import importlib
import inspect
import pickle
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import shop

from sqla_jobs.context import AsyncJobContext, JobContext
from sqla_jobs.core.retry import Retry
from sqla_jobs.errors import ArgumentError, ConfigurationError, DuplicateTask, TaskDefinitionError
from sqla_jobs.models import job_model
from sqla_jobs.tasks import Jobs

Importer = Callable[..., ModuleType]


@pytest.fixture
def jobs() -> Jobs:
    """Without a task."""
    return Jobs(shop.Job)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Importer]:
    """Write a module of the user's, and import it."""
    before = set(sys.modules)
    written: set[str] = set()
    monkeypatch.syspath_prepend(tmp_path)

    def write(name: str, source: str, *, run: bool = True) -> Any:
        written.add(name.partition(".")[0])
        path = tmp_path.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source))
        importlib.invalidate_caches()
        return importlib.import_module(name) if run else path

    yield write
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in written:
            del sys.modules[name]


# -- what may not be a task


class Sender:
    def method(self, value: int) -> None: ...

    @staticmethod
    def static(value: int) -> None: ...

    @classmethod
    def by_class(cls, value: int) -> None: ...

    def __call__(self, value: int) -> None: ...


def ordinary(value: int) -> None: ...


def generator(value: int) -> Iterator[int]:
    yield value


async def async_generator(value: int) -> AsyncIterator[int]:
    yield value


def bare_ctx(ctx, value: int) -> None: ...  # type: ignore[no-untyped-def]


def bare_context(context) -> None: ...  # type: ignore[no-untyped-def]


def any_number(*values: int) -> None: ...


def any_names(**values: int) -> None: ...


def by_position(value: int, /) -> None: ...


async def sync_context_in_async(ctx: JobContext) -> None: ...


def async_context_in_sync(ctx: AsyncJobContext) -> None: ...


def context_second(value: int, ctx: JobContext) -> None: ...


def context_by_name(*, ctx: JobContext) -> None: ...


def _local() -> Callable[..., Any]:
    def inner(value: int) -> None: ...

    return inner


A_METHOD = "it is a method; a job has no self: write a module-level function"
IN_A_CLASS = "it is defined in a class; a job has no self: write a module-level function"
A_GENERATOR = "it is a generator, which would do nothing when called: return a value instead"

REFUSED: dict[str, tuple[Any, str]] = {
    "method": (Sender.method, f"Sender.method cannot be a task: {IN_A_CLASS}"),
    "function of a staticmethod": (Sender.static, f"Sender.static cannot be a task: {IN_A_CLASS}"),
    "staticmethod object": (vars(Sender)["static"], A_METHOD),
    "classmethod object": (vars(Sender)["by_class"], A_METHOD),
    "bound method": (Sender().method, f"Sender.method cannot be a task: {A_METHOD}"),
    "bound classmethod": (Sender.by_class, A_METHOD),
    "partial": (functools.partial(ordinary, 1), "it is a partial, not a function: write a def"),
    "builtin": (len, "len cannot be a task: it is a builtin_function_or_method, not a function"),
    "class": (Sender, "Sender cannot be a task: it is a type, not a function: write a def that calls it"),
    "callable object": (Sender(), "it is a Sender, not a function: write a def that calls it"),
    "text": ("mail", "'mail' cannot be a task: it is a str, not a function"),
    "lambda": (lambda value: None, "a lambda has no name to find it by: write a def"),
    "generator": (generator, f"generator cannot be a task: {A_GENERATOR}"),
    "async generator": (async_generator, f"async_generator cannot be a task: {A_GENERATOR}"),
    "local": (_local(), "it is local to another function: give it a name="),
    "task": (shop.note, "note cannot be a task: it is a task already; two kinds of one function need two"),
    "ctx without annotation": (bare_ctx, "bare_ctx: annotate 'ctx' with JobContext or AsyncJobContext"),
    "context without annotation": (bare_context, "bare_context: annotate 'context' with JobContext"),
    "*args": (any_number, "any_number: 'values' is variadic positional, .* spell out the parameters"),
    "**kwargs": (any_names, "any_names: 'values' is variadic keyword, .* spell out the parameters"),
    "positional-only": (by_position, "by_position: 'value' is positional-only, .* remove the /"),
    "sync context in async def": (sync_context_in_async, "async def with a JobContext.* AsyncJobContext"),
    "async context in def": (async_context_in_sync, "plain def with an AsyncJobContext.* JobContext"),
    "context not first": (context_second, "context_second: 'ctx' is a context, .* must be the first"),
    "context by name": (context_by_name, "context_by_name: .*cannot take the context by position"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_function_that_cannot_be_a_task_is_refused_with_its_reason(jobs: Jobs, what: str) -> None:
    function, reason = REFUSED[what]

    with pytest.raises(TaskDefinitionError, match=reason):
        jobs.task(function)

    assert jobs.tasks == {}


@pytest.mark.parametrize("what", [what for what in REFUSED if what != "local"])
def test_a_name_does_not_help_what_cannot_be_a_task(jobs: Jobs, what: str) -> None:
    function, reason = REFUSED[what]

    with pytest.raises(TaskDefinitionError, match=reason):
        jobs.task(name="named")(function)


def test_a_method_of_a_local_class_is_refused_even_with_a_name(jobs: Jobs) -> None:
    class Local:
        def method(self, value: int) -> None: ...

    with pytest.raises(TaskDefinitionError, match=IN_A_CLASS):
        jobs.task(name="named")(Local.method)


def test_a_local_function_with_a_name_is_a_task(jobs: Jobs) -> None:
    assert jobs.task(name="named")(_local()).kind == "named"


def test_a_context_may_be_positional_only(jobs: Jobs) -> None:
    @jobs.task(name="posonly")
    def handler(ctx: JobContext, /, value: int) -> int:
        return value

    assert handler.takes_context
    assert handler.call(3).arguments.text() == '{"value":3}'


OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "empty name": ({"name": ""}, "kind must have 1 to 200 bytes"),
    "long name": ({"name": "é" * 101}, "kind must have 1 to 200 bytes, .* has 202"),
    "name that is none": ({"name": 7}, "kind must be a str, got int"),
    "empty queue": ({"queue": ""}, "queue must have 1 to 200 bytes"),
    "NUL in an alias": ({"aliases": ["a\0b"]}, r"alias .* holds U\+0000"),
    "one text as aliases": ({"aliases": "old"}, r"aliases takes several texts, got one: write \['old'\]"),
    "large priority": ({"priority": 2**15}, r"priority must fit a smallint \(-32768 to 32767\), got 32768"),
    "a number as retry": ({"retry": 8}, r"retry takes a Retry\(\.\.\.\), got 8"),
}


@pytest.mark.parametrize("what", OPTIONS)
def test_an_option_that_cannot_work_is_refused_at_decoration(jobs: Jobs, what: str) -> None:
    options, reason = OPTIONS[what]

    with pytest.raises(ConfigurationError, match=reason):
        jobs.task(**options)(ordinary)

    assert jobs.tasks == {}


def test_a_model_that_is_no_job_class_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"Order.* is not a mapped Job class: write `class Job"):
        Jobs(shop.Order)  # type: ignore[arg-type]


def test_without_a_model_the_ready_made_one_serves() -> None:
    assert Jobs().Job is job_model()


# -- kinds

APPLICATION = """
    from sqla_jobs.tasks import Jobs

    jobs = Jobs()


    @jobs.task
    def ping() -> None: ...


    if __name__ == "__main__":
        print(ping.kind)
"""


def test_the_kind_is_module_and_function(module: Importer) -> None:
    application = module("app.tasks", APPLICATION)

    assert application.ping.kind == "app.tasks.ping"
    assert dict(application.jobs.tasks) == {"app.tasks.ping": application.ping}


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        (["folder/my_script.py"], "my_script.ping"),
        (["-m", "package.module"], "package.module.ping"),
        (["-m", "package"], "package.ping"),
    ],
    ids=["script", "module", "package"],
)
def test_the_kind_of_a_program_is_what_a_worker_will_import(
    module: Importer, tmp_path: Path, command: list[str], kind: str
) -> None:
    for name in ("folder.my_script", "package.module", "package.__main__"):
        module(name, APPLICATION, run=False)

    ran = subprocess.run(
        [sys.executable, *command], cwd=tmp_path, check=True, capture_output=True, text=True, timeout=60
    )

    assert ran.stdout == f"{kind}\n"


def test_name_replaces_the_kind_and_aliases_are_found_beside_it(jobs: Jobs) -> None:
    task = jobs.task(name="send", aliases=["mail.send", "old.send"])(ordinary)

    assert task.kind == "send"
    assert dict(jobs.tasks) == {"send": task, "mail.send": task, "old.send": task}


def test_the_tasks_of_an_application_are_not_changed_from_outside(jobs: Jobs) -> None:
    task = jobs.task(name="send")(ordinary)

    assert jobs.tasks["send"] is task
    with pytest.raises(TypeError):
        jobs.tasks["other"] = task  # type: ignore[index]


@pytest.mark.parametrize(
    ("first", "second", "taken"),
    [
        ({"name": "a"}, {"name": "a"}, "a"),
        ({"name": "a", "aliases": ["b"]}, {"name": "b"}, "b"),
        ({"name": "a"}, {"name": "b", "aliases": ["a"]}, "a"),
        ({"name": "a", "aliases": ["c"]}, {"name": "b", "aliases": ["c"]}, "c"),
    ],
)
def test_a_kind_or_alias_that_is_taken_is_refused_and_registers_nothing(
    jobs: Jobs, first: dict[str, Any], second: dict[str, Any], taken: str
) -> None:
    jobs.task(**first)(ordinary)
    before = dict(jobs.tasks)

    with pytest.raises(
        DuplicateTask, match=rf"kind '{taken}' is taken by .*\.ordinary; give .*inner another"
    ):
        jobs.task(**second)(_local())

    assert dict(jobs.tasks) == before


def test_two_local_functions_of_one_name_are_two(jobs: Jobs) -> None:
    jobs.task(name="a")(_local())

    with pytest.raises(DuplicateTask):
        jobs.task(name="a")(_local())


def test_a_module_that_is_reloaded_replaces_its_tasks(module: Importer) -> None:
    registry = module("app_jobs", "from sqla_jobs.tasks import Jobs\n\njobs = Jobs()\n")
    tasks = module("app_tasks", "from app_jobs import jobs\n\n\n@jobs.task\ndef ping() -> None: ...\n")
    first = tasks.ping

    importlib.reload(tasks)

    assert tasks.ping is not first
    assert dict(registry.jobs.tasks) == {"app_tasks.ping": tasks.ping}


def test_one_function_may_be_a_task_of_two_applications(jobs: Jobs) -> None:
    other = Jobs()

    one, two = jobs.task(ordinary), other.task(ordinary)

    assert one.kind == two.kind
    assert (one.jobs, two.jobs) == (jobs, other)


# -- what a task keeps of its function


def test_a_direct_call_runs_the_function_and_returns_what_it_returns(jobs: Jobs) -> None:
    @jobs.task(name="add")
    def add(one: int, other: int = 1) -> int:
        return one + other

    @jobs.task(name="with_context")
    def with_context(ctx: JobContext, value: int) -> tuple[JobContext, int]:
        return ctx, value

    context = JobContext(
        id=1, queue="default", kind="with_context", attempt=1, max_attempts=1, open_session=lambda: None
    )

    assert (add(2), add(2, other=3)) == (3, 5)
    assert with_context(context, value=4) == (context, 4)
    assert with_context(context, 4) == (context, 4)


async def test_a_direct_call_of_an_async_task_is_awaited(jobs: Jobs) -> None:
    @jobs.task(name="add")
    async def add(one: int) -> int:
        await asyncio.sleep(0)
        return one + 1

    assert add.is_async
    assert await add(2) == 3


def test_a_task_looks_like_its_function(jobs: Jobs) -> None:
    def handler(ctx: JobContext, value: int = 3) -> str:
        """Say something."""
        return str(value)

    handler.kind = "an attribute of the user's"  # type: ignore[attr-defined]
    task = jobs.task(name="handler")(handler)

    assert (task.__name__, task.__doc__, task.__module__) == ("handler", "Say something.", __name__)  # type: ignore[attr-defined]
    assert inspect.signature(task) == inspect.signature(handler)
    assert (task.kind, repr(task)) == ("handler", "<Task handler>")
    assert (task.is_async, task.takes_context) == (False, True)


def test_a_decorated_function_keeps_the_parameters_it_shows(jobs: Jobs) -> None:
    def twice(function: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> int:
            return 2 * function(*args, **kwargs)

        return wrapper

    @jobs.task(name="double")
    @twice
    def double(value: int) -> int:
        return value

    assert double.call(3).arguments.text() == '{"value":3}'
    assert double(3) == 6


def test_a_task_of_a_module_is_pickled_by_its_name(module: Importer) -> None:
    application = module("app.tasks", APPLICATION)

    assert pickle.loads(pickle.dumps(application.ping)) is application.ping
    assert copy.copy(application.ping) is application.ping
    assert copy.deepcopy(application.ping) is application.ping


def test_a_call_is_the_kind_the_arguments_and_the_options(jobs: Jobs) -> None:
    task = jobs.task(name="send", queue="mail", priority=3, retry=Retry(max_attempts=8))(ordinary)

    call = task.call(7)

    assert (call.kind, call.arguments.text()) == ("send", '{"value":7}')
    assert (call.options.queue, call.options.priority, call.options.max_attempts) == ("mail", 3, 8)
    with pytest.raises(ArgumentError, match="misses value"):
        task.call()  # type: ignore[call-arg]


# -- using


def test_using_returns_a_twin_and_leaves_the_original(jobs: Jobs) -> None:
    task = jobs.task(name="send", queue="mail")(ordinary)
    moment = datetime(2031, 1, 1, tzinfo=UTC)

    twin = task.using(priority=5, delay=timedelta(minutes=1), expires=moment, max_attempts=2, tags=["a", "b"])

    assert type(twin) is type(task)
    assert (twin.kind, twin.options.queue, twin.options.priority) == ("send", "mail", 5)
    assert (twin.options.delay, twin.options.expires) == (timedelta(minutes=1), moment)
    assert (twin.options.max_attempts, twin.options.tags) == (2, ("a", "b"))
    assert (task.options.priority, task.options.delay, task.options.tags) == (0, None, ())
    assert jobs.tasks["send"] is task


def test_using_again_adds_to_what_was_said(jobs: Jobs) -> None:
    task = jobs.task(name="send")(ordinary)

    twin = task.using(queue="mail", priority=1).using(priority=2)

    assert (twin.options.queue, twin.options.priority) == ("mail", 2)


def test_using_zero_and_nothing_are_not_the_same(jobs: Jobs) -> None:
    task = jobs.task(name="send", priority=5)(ordinary)

    assert task.using(priority=0, delay=timedelta(0), tags=()).options.priority == 0
    assert task.using().options == task.options


USING: dict[str, tuple[dict[str, Any], str]] = {
    "naive run_at": ({"run_at": datetime(2031, 1, 1)}, "run_at 2031-01-01T00:00:00 has no time zone"),
    "delay and run_at": (
        {"delay": timedelta(1), "run_at": datetime(2031, 1, 1, tzinfo=UTC)},
        "give delay or run_at, not both",
    ),
    "negative delay": ({"delay": timedelta(seconds=-1)}, "delay must lie between 0 and 100 years"),
    "one text as tags": ({"tags": "urgent"}, r"tags takes several texts, got one: write \['urgent'\]"),
    "empty queue": ({"queue": ""}, "queue must have 1 to 200 bytes"),
    "ordering_key": (
        {"ordering_key": "customer-7"},
        "ordering_key='customer-7': this release does not run jobs with an ordering key yet; leave it out",
    ),
}


@pytest.mark.parametrize("what", USING)
def test_using_refuses_what_cannot_work(jobs: Jobs, what: str) -> None:
    options, reason = USING[what]
    task = jobs.task(name="send")(ordinary)

    with pytest.raises(ConfigurationError, match=reason):
        task.using(**options)


# -- annotations that are text


def test_names_imported_for_type_checkers_only_are_found_among_the_mapped_classes(module: Importer) -> None:
    application = module(
        "app_late",
        """
        from __future__ import annotations

        from typing import TYPE_CHECKING

        from shop import Job

        from sqla_jobs.tasks import Jobs

        if TYPE_CHECKING:
            from shop import Order

        jobs = Jobs(Job)


        @jobs.task
        def ship(order: Order, later: Later | None = None) -> None: ...


        @jobs.task
        def weigh(weight: float) -> None: ...


        class Later: ...


        Later = int
        """,
    )

    ship, weigh = application.ship, application.weigh
    references = ship.call(shop.Order(customer="Ada")).arguments.references

    assert [reference.path for reference in references] == ["order"]
    assert ship.call(shop.Order(customer="Ada"), later=3)
    assert (ship.takes_entities, weigh.takes_entities) == (True, False)


def test_a_name_that_nobody_knows_is_reported_at_the_first_call_with_task_and_parameter(
    module: Importer,
) -> None:
    application = module(
        "app_unknown",
        """
        from __future__ import annotations

        from sqla_jobs.tasks import Jobs

        jobs = Jobs()


        @jobs.task
        def ship(order: Nobody) -> None: ...
        """,
    )

    with pytest.raises(TaskDefinitionError, match=r"task app_unknown\.ship: parameter 'order' is .* Nobody"):
        application.ship.call(1)


CONTEXTS = {
    "sync": [
        "JobContext",
        "'JobContext'",
        "JobContext[Session]",
        "Sync",
        "context.JobContext",
        "Hidden.JobContext",
        "Hidden.JobContext[Hidden.Session]",
    ],
    "async": [
        "AsyncJobContext",
        "JobContext[AsyncSession]",
        "JobContext[OwnSession]",
        "Async",
        "context.AsyncJobContext",
        "context.JobContext[aio.AsyncSession]",
        "Hidden.AsyncJobContext",
        "Hidden.JobContext[Hidden.AsyncSession]",
        "JobContext[Hidden.aio.AsyncSession]",
    ],
    "none": ["int", "Hidden.Order", "dict[str, JobContextual]", "JobContextual"],
}
CASES = [(kind, text) for kind, texts in CONTEXTS.items() for text in texts]


@pytest.mark.parametrize(("kind", "annotation"), CASES, ids=[text for _, text in CASES])
def test_a_context_is_known_by_its_annotation_also_when_that_is_text(
    module: Importer, kind: str, annotation: str
) -> None:
    application = module(
        "app_text",
        f"""
        from __future__ import annotations

        from sqlalchemy.ext import asyncio as aio
        from sqlalchemy.ext.asyncio import AsyncSession
        from sqlalchemy.orm import Session

        from sqla_jobs import context
        from sqla_jobs.context import AsyncJobContext, JobContext
        from sqla_jobs.context import AsyncJobContext as Async
        from sqla_jobs.context import JobContext as Sync
        from sqla_jobs.tasks import Jobs


        class JobContextual: ...


        class OwnSession(AsyncSession): ...


        jobs = Jobs()


        def plain(first: {annotation}, value: int) -> None: ...


        async def coroutine(first: {annotation}, value: int) -> None: ...
        """,
    )
    refused = {"sync": [application.coroutine], "async": [application.plain], "none": []}[kind]

    for function in (application.plain, application.coroutine):
        if function in refused:
            with pytest.raises(TaskDefinitionError, match="annotate the first parameter"):
                application.jobs.task(function)
        else:
            assert application.jobs.task(function).takes_context is (kind != "none")
