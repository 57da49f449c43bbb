"""events: who is told what, in which order, and what a broken listener may not do."""

import ast
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

import sqla_jobs.events
from sqla_jobs.events import EVENTS, Event, Events

SOURCE = Path(sqla_jobs.events.__file__).parent


def names_of(events: list[Event]) -> list[str]:
    return [event.name for event in events]


# -- emit


def test_a_listener_is_told_the_name_and_the_fields() -> None:
    seen: list[Event] = []
    events = Events()
    events.subscribe(seen.append, "lease.lost")

    events.emit("lease.lost", job=7, reason="rescued")

    assert [(event.name, event.fields) for event in seen] == [("lease.lost", {"job": 7, "reason": "rescued"})]


def test_listeners_are_told_in_the_order_in_which_they_subscribed() -> None:
    order: list[str] = []
    events = Events()
    events.subscribe(lambda event: order.append("first"), "job.claimed")
    events.subscribe(lambda event: order.append("second"))
    events.subscribe(lambda event: order.append("third"), "job.settled", "job.claimed")

    events.emit("job.claimed", jobs=[])

    assert order == ["first", "second", "third"]


def test_a_listener_is_told_at_once_and_every_time() -> None:
    seen: list[Event] = []
    events = Events()
    events.subscribe(seen.append, "job.claimed")

    counts = []
    for _ in range(3):
        events.emit("job.claimed", jobs=[])
        counts.append(len(seen))

    assert counts == [1, 2, 3]


def test_a_listener_hears_only_the_names_it_gave() -> None:
    seen: list[Event] = []
    events = Events()
    events.subscribe(seen.append, "job.claimed", "job.settled")

    for name in ("job.claimed", "lease.lost", "job.settled"):
        events.emit(name)

    assert names_of(seen) == ["job.claimed", "job.settled"]


def test_without_a_name_a_listener_hears_everything() -> None:
    seen: list[Event] = []
    events = Events()
    events.subscribe(seen.append)

    for name in EVENTS:
        events.emit(name)

    assert names_of(seen) == list(EVENTS)


def test_a_name_given_twice_is_told_once() -> None:
    seen: list[Event] = []
    events = Events()
    events.subscribe(seen.append, "job.claimed", "job.claimed")

    events.emit("job.claimed", jobs=[])

    assert len(seen) == 1


def test_what_nobody_listens_to_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    events = Events()
    events.subscribe(print, "job.claimed")()

    with caplog.at_level(logging.DEBUG):
        events.emit("job.claimed", jobs=[])
        events.emit("lease.lost", job=7)

    assert caplog.records == []


def test_a_field_may_be_called_like_a_parameter() -> None:
    seen: list[Event] = []
    events = Events()
    events.subscribe(seen.append, "lease.lost")

    events.emit("lease.lost", name="x", self="y")

    assert seen[0].fields == {"name": "x", "self": "y"}


# -- subscribe


def test_a_name_that_no_event_has_is_refused_with_those_there_are() -> None:
    events = Events()

    with pytest.raises(
        ValueError, match=r"no event is called job\.stetled, lease\.last; there are"
    ) as caught:
        events.subscribe(print, "lease.last", "job.claimed", "job.stetled")

    assert all(name in str(caught.value) for name in EVENTS)


def test_a_refused_subscription_subscribes_to_nothing() -> None:
    seen: list[Event] = []
    events = Events()

    with pytest.raises(ValueError, match=r"lease\.last"):
        events.subscribe(seen.append, "job.claimed", "lease.last")
    events.emit("job.claimed", jobs=[])

    assert seen == []


# -- unsubscribe


def test_an_unsubscribed_listener_hears_nothing_more_and_the_others_go_on() -> None:
    left: list[Event] = []
    stayed: list[Event] = []
    events = Events()
    unsubscribe = events.subscribe(left.append)
    events.subscribe(stayed.append)

    unsubscribe()
    events.emit("job.claimed", jobs=[])

    assert (left, names_of(stayed)) == ([], ["job.claimed"])


def test_a_listener_subscribed_twice_for_different_names_ends_one_subscription_at_a_time() -> None:
    seen: list[Event] = []
    listener = seen.append
    events = Events()
    unsubscribe = events.subscribe(listener, "job.claimed", "lease.lost")
    events.subscribe(listener, "job.settled", "lease.lost")

    unsubscribe()
    for name in ("job.claimed", "lease.lost", "job.settled"):
        events.emit(name)

    assert names_of(seen) == ["lease.lost", "job.settled"]


def test_a_listener_subscribed_twice_for_one_name_is_told_twice_and_after_one_end_once() -> None:
    seen: list[Event] = []
    listener = seen.append
    events = Events()
    unsubscribe = events.subscribe(listener, "job.claimed")
    events.subscribe(listener, "job.claimed")

    events.emit("job.claimed", jobs=[])
    before = len(seen)
    unsubscribe()
    events.emit("job.claimed", jobs=[])

    assert (before, len(seen)) == (2, 3)


def test_unsubscribing_again_ends_nobody_elses_subscription() -> None:
    seen: list[Event] = []
    listener = seen.append
    events = Events()
    unsubscribe = events.subscribe(listener, "job.claimed")
    unsubscribe()
    events.subscribe(listener, "job.claimed")

    unsubscribe()
    events.emit("job.claimed", jobs=[])

    assert len(seen) == 1


def test_a_listener_may_unsubscribe_itself_while_it_is_told() -> None:
    order: list[str] = []
    events = Events()

    def once(event: Event) -> None:
        order.append("once")
        unsubscribe()

    unsubscribe = events.subscribe(once, "job.claimed")
    events.subscribe(lambda event: order.append("always"), "job.claimed")

    events.emit("job.claimed", jobs=[])
    events.emit("job.claimed", jobs=[])

    assert order == ["once", "always", "always"]


def test_a_listener_added_while_an_event_is_told_hears_the_next_one() -> None:
    seen: list[Event] = []
    events = Events()
    unsubscribe = events.subscribe(lambda event: events.subscribe(seen.append, "job.claimed"), "job.claimed")

    events.emit("job.claimed", jobs=[1])
    unsubscribe()
    events.emit("job.claimed", jobs=[2])

    assert [event.fields for event in seen] == [{"jobs": [2]}]


# -- a listener that raises


class Broken(Exception):
    pass


def test_a_listener_that_raises_is_logged_and_the_others_are_told(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[Event] = []
    events = Events()

    def broken(event: Event) -> None:
        raise Broken("no such gauge")

    events.subscribe(broken, "lease.lost")
    events.subscribe(seen.append, "lease.lost")

    events.emit("lease.lost", job=7)
    events.emit("lease.lost", job=8)

    assert [event.fields["job"] for event in seen] == [7, 8]
    assert [record.getMessage() for record in caplog.records] == ["a listener of lease.lost failed"] * 2
    assert caplog.records[0].exc_info is not None
    assert isinstance(caplog.records[0].exc_info[1], Broken)


def test_a_listener_cannot_swallow_the_end_of_the_process() -> None:
    events = Events()

    def interrupted(event: Event) -> None:
        raise KeyboardInterrupt

    events.subscribe(interrupted, "job.claimed")

    with pytest.raises(KeyboardInterrupt):
        events.emit("job.claimed", jobs=[])


# -- the list of events and the code


def emits() -> Iterator[tuple[str, ast.Call]]:
    """Every call of `.emit(...)` in the package, with where it is."""
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "emit"
            ):
                yield f"{path.relative_to(SOURCE)}:{node.lineno}", node


def named(keyword: ast.keyword) -> list[str | None]:
    """The fields that an argument of `emit` gives; `**_named(job)` stands for the three that name a job."""
    spread = keyword.value.func if keyword.arg is None and isinstance(keyword.value, ast.Call) else None
    return ["job", "queue", "kind"] if getattr(spread, "id", None) == "_named" else [keyword.arg]


def test_every_emit_names_an_event_and_gives_exactly_its_fields() -> None:
    wrong: list[str] = []
    for where, call in emits():
        name = call.args[0].value if call.args and isinstance(call.args[0], ast.Constant) else None
        fields = [field for keyword in call.keywords for field in named(keyword)]
        if not isinstance(name, str) or len(call.args) != 1 or None in fields:
            wrong.append(f"{where}: the name and the fields must be written out")
        elif name not in EVENTS:
            wrong.append(f"{where}: {name} is not an event")
        elif sorted(EVENTS[name]) != sorted(str(field) for field in fields):
            wrong.append(f"{where}: {name} has {EVENTS[name]}, given {fields}")

    assert wrong == []


def test_the_scan_of_the_source_sees_the_emits() -> None:
    seen = {call.args[0].value for _, call in emits() if isinstance(call.args[0], ast.Constant)}

    # hot, rare, and spread over several modules: if these are seen, the scan looks where it should
    assert {"job.claimed", "job.rescued", "lease.lost", "listen.lost", "database.error"} <= seen


def test_event_names_are_a_thing_and_what_happened_to_it() -> None:
    odd = [
        name
        for name in EVENTS
        if name.count(".") != 1 or not name.replace(".", "").replace("_", "").islower()
    ]

    assert odd == []
