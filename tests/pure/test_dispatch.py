"""core.dispatch: each rule by itself, then all of them in a thousand simulated worlds.

The world below has a virtual clock, queues, slots, a settle lane and a driver that works like
worker.loop. It counts for itself what is open and held, and knows what the dispatcher has been told;
what it demands is said in `World` and shares no code with core.dispatch.
"""

import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count, pairwise
from math import inf
from typing import Any

import pytest

from sqla_jobs.core.dispatch import Claim, Dispatcher, Wait

# -- rules, one by one


class Driver:
    """A dispatcher and its clock, for tests that tell a story step by step."""

    def __init__(
        self,
        *queues: str,
        concurrency: int = 10,
        poll: float = 5.0,
        claim_limit: int = 500,
        once: bool = False,
        budget: int | None = None,
    ) -> None:
        self.now = 1000.0
        self.dispatcher = Dispatcher(
            queues=queues or ("q",),
            concurrency=concurrency,
            poll=poll,
            now=self.now,
            claim_limit=claim_limit,
            once=once,
            budget=budget,
        )

    def next(self) -> Claim | Wait:
        return self.dispatcher.next(self.now)

    def claim(self) -> Claim:
        """What is to be claimed now: there must be something."""
        step = self.next()
        assert isinstance(step, Claim), f"expected a claim at {self.now}, got {step}"
        return step

    def wait(self) -> float | None:
        """How many seconds there is nothing to claim."""
        step = self.next()
        assert isinstance(step, Wait), f"expected a wait at {self.now}, got {step}"
        return None if step.until is None else step.until - self.now

    def answer(self, step: Claim, got: int, *, spread: float = 0.5) -> None:
        self.dispatcher.claimed(step, got=got, now=self.now, spread=spread)

    def take(self, got: int) -> Claim:
        step = self.claim()
        self.answer(step, got)
        return step

    def find_nothing(self) -> None:
        """Claim until every queue has been found empty."""
        for _ in range(100):
            step = self.next()
            if isinstance(step, Wait):
                return
            self.answer(step, 0)
        raise AssertionError("claims without end")

    def end(self, number: int) -> None:
        self.dispatcher.ended(number, now=self.now)

    def finish(self, number: int) -> None:
        """They end and are settled."""
        self.end(number)
        self.dispatcher.settled(number)

    def wake(self, queue: str | None = "q", due_in: float = 0.0) -> None:
        self.dispatcher.woken(queue, now=self.now, due_in=due_in)

    def listen(self, alive: bool = True) -> None:
        self.dispatcher.listening(alive, now=self.now)

    def hurry(self, *, each: int = 10, every: float = 0.005, times: int = 45) -> None:
        """There are jobs without end; `each` end `every` so many seconds, and at last all that run."""
        for _ in range(times):
            if isinstance(step := self.next(), Claim):
                self.answer(step, step.limit)
            self.now += every
            self.finish(min(each, self.dispatcher.open))
        self.finish(self.dispatcher.open)


def test_every_queue_is_claimed_at_the_start() -> None:
    driver = Driver("a", "b", "c")

    claimed = [driver.take(0).queue for _ in range(3)]

    assert claimed == ["a", "b", "c"]
    assert driver.wait() is not None


# wake-ups


def test_a_wake_up_leads_to_a_claim_of_its_queue() -> None:
    driver = Driver("a", "b")
    driver.find_nothing()

    driver.wake("b")

    assert driver.take(0).queue == "b"
    assert driver.wait() is not None


def test_a_wake_up_of_no_queue_in_particular_leads_to_a_claim_of_each() -> None:
    driver = Driver("a", "b")
    driver.find_nothing()

    driver.wake(None)

    assert {driver.take(0).queue, driver.take(0).queue} == {"a", "b"}


def test_a_wake_up_of_a_queue_that_is_not_worked_here_is_nothing() -> None:
    driver = Driver("a")
    driver.find_nothing()
    before = driver.wait()

    driver.wake("somebody else's")

    assert driver.wait() == before


def test_a_wake_up_during_a_claim_leads_to_another_claim() -> None:
    driver = Driver()
    step = driver.claim()

    driver.wake()
    driver.answer(step, 0)

    assert driver.claim().queue == "q"


def test_a_wake_up_during_a_claim_that_fails_leads_to_another_claim() -> None:
    driver = Driver()
    step = driver.claim()

    driver.wake()
    driver.dispatcher.claim_failed(step, retry_at=driver.now + 60)

    assert driver.claim().queue == "q"


def test_wake_ups_that_arrive_together_lead_to_one_claim() -> None:
    driver = Driver()
    driver.find_nothing()

    for _ in range(50):
        driver.wake()
    driver.take(0)

    assert driver.wait() is not None


def test_a_wake_up_for_later_leads_to_a_claim_then_and_not_before() -> None:
    driver = Driver()
    driver.listen()
    driver.find_nothing()

    driver.wake(due_in=0.25)
    pause = driver.wait()
    driver.now += 0.25

    assert pause == pytest.approx(0.25)
    assert driver.claim().look_ahead  # for the next due time, and because a timer may run a little fast


def test_a_wake_up_for_later_during_a_claim_is_kept() -> None:
    driver = Driver()
    driver.listen()
    step = driver.claim()

    driver.wake(due_in=0.25)
    driver.answer(step, 0)

    assert driver.wait() == pytest.approx(0.25)


def test_the_earliest_of_several_times_counts() -> None:
    driver = Driver()
    driver.listen()
    driver.find_nothing()

    driver.wake(due_in=0.3)
    driver.wake(due_in=0.2)
    driver.wake(due_in=0.4)

    assert driver.wait() == pytest.approx(0.2)


def test_a_time_told_is_not_forgotten_by_a_claim_for_another_job() -> None:
    driver = Driver()
    driver.listen()
    driver.find_nothing()
    poll(driver, times=8)  # the next poll is far away

    driver.wake(due_in=10)
    driver.wake()
    driver.take(0)

    assert driver.wait() == pytest.approx(10)


def test_a_time_told_is_not_forgotten_by_a_claim_that_fails() -> None:
    driver = Driver()
    driver.listen()
    driver.find_nothing()
    poll(driver, times=8)

    driver.wake(due_in=10)
    driver.wake()
    driver.dispatcher.claim_failed(driver.claim(), retry_at=driver.now + 1)
    driver.now += 1
    driver.take(0)

    assert driver.wait() == pytest.approx(9)


def test_a_full_claim_leaves_its_look_ahead_to_the_next() -> None:
    # the driver looks ahead only when less came than was asked for
    driver = Driver(concurrency=1)
    driver.listen()
    driver.find_nothing()
    poll(driver, times=8)  # the next poll is far away
    driver.wake(due_in=1)
    driver.now += 1

    first = driver.take(1)
    driver.finish(1)
    second = driver.claim()

    assert (first.look_ahead, second.look_ahead) == (True, True)


def test_a_failed_claim_leaves_its_look_ahead_to_the_next() -> None:
    driver = Driver()
    driver.listen()
    driver.find_nothing()
    poll(driver, times=3)
    driver.wake(due_in=1)
    driver.now += 1

    first = driver.claim()
    driver.dispatcher.claim_failed(first, retry_at=driver.now + 0.1)
    driver.now += 0.1

    assert (first.look_ahead, driver.claim().look_ahead) == (True, True)


def test_what_a_look_ahead_found_to_be_due_by_now_is_claimed_with_another_look_ahead() -> None:
    # or what is due after that is nobody's business until the next poll
    driver = Driver()
    driver.listen()
    driver.find_nothing()
    poll(driver, times=7)
    driver.now += driver.wait() or 0
    driver.take(0)

    driver.wake(due_in=0.0)  # the answer of the look-ahead

    assert driver.claim().look_ahead


def test_a_wake_up_alone_needs_no_look_ahead_while_wake_ups_arrive() -> None:
    driver = Driver()
    driver.listen()
    driver.find_nothing()
    poll(driver, times=8)
    assert driver.wait() == pytest.approx(30)

    driver.wake()

    assert not driver.claim().look_ahead


def test_every_claim_looks_ahead_while_no_wake_up_can_arrive() -> None:
    driver = Driver()
    driver.find_nothing()

    driver.wake()

    assert driver.claim().look_ahead


# the poll


def poll(driver: Driver, times: int, *, spread: float = 0.5) -> list[float]:
    """Let so many polls pass that find nothing; the pauses before each."""
    pauses = []
    for _ in range(times):
        pause = driver.wait()
        assert pause is not None
        pauses.append(pause)
        driver.now += pause
        step = driver.claim()
        assert step.look_ahead
        driver.answer(step, 0, spread=spread)
    return pauses


def test_polls_double_from_half_a_second_to_the_poll_interval() -> None:
    driver = Driver(poll=5)
    driver.take(0)

    pauses = poll(driver, times=6)

    assert pauses == pytest.approx([0.5, 1, 2, 4, 5, 5])


def test_polls_double_to_thirty_seconds_while_wake_ups_arrive() -> None:
    driver = Driver(poll=5)
    driver.listen()
    driver.take(0)

    pauses = poll(driver, times=8)

    assert pauses == pytest.approx([0.5, 1, 2, 4, 8, 16, 30, 30])


def test_a_poll_interval_above_thirty_seconds_is_kept_while_wake_ups_arrive() -> None:
    driver = Driver(poll=45)
    driver.listen()
    driver.take(0)

    pauses = poll(driver, times=9)

    assert pauses[-3:] == pytest.approx([32, 45, 45])


def test_a_poll_interval_below_half_a_second_is_kept_from_the_start() -> None:
    driver = Driver(poll=0.1)
    driver.take(0)

    pauses = poll(driver, times=3)

    assert pauses == pytest.approx([0.1, 0.1, 0.1])


@pytest.mark.parametrize(("spread", "factor"), [(0.0, 0.75), (0.5, 1.0), (0.999, 1.2495)])
def test_polls_are_scattered_by_a_quarter_to_both_sides(spread: float, factor: float) -> None:
    driver = Driver(poll=5)
    driver.take(0)

    pauses = poll(driver, times=6, spread=spread)

    assert pauses[1:] == pytest.approx([1 * factor, 2 * factor, 4 * factor, 5 * factor, 5 * factor])


def test_a_job_found_makes_the_polls_short_again() -> None:
    driver = Driver(poll=5)
    driver.take(0)
    poll(driver, times=5)

    pause = driver.wait()
    assert pause is not None
    driver.now += pause
    driver.take(1)

    assert driver.wait() == pytest.approx(0.5)


def test_wake_ups_that_find_nothing_do_not_put_off_the_poll() -> None:
    driver = Driver(poll=5)
    driver.listen()
    driver.find_nothing()
    poll(driver, times=3)
    pause = driver.wait()
    assert pause is not None
    ends = driver.now + pause

    while driver.now + 0.1 < ends:
        driver.now += 0.1
        driver.wake()
        driver.take(0)

    assert driver.now + (driver.wait() or 0) == pytest.approx(ends)


def test_what_was_missed_is_looked_for_when_wake_ups_arrive_again() -> None:
    driver = Driver("a", "b")
    driver.find_nothing()

    driver.listen()
    steps = [driver.take(0), driver.take(0)]

    assert {(step.queue, step.look_ahead) for step in steps} == {("a", True), ("b", True)}


def test_polls_are_short_again_when_wake_ups_stop_arriving() -> None:
    driver = Driver(poll=5)
    driver.listen()
    driver.find_nothing()
    poll(driver, times=8)

    driver.listen(False)

    assert driver.wait() == pytest.approx(5)


def test_hearing_the_same_about_listening_again_changes_nothing() -> None:
    driver = Driver()
    driver.listen()
    driver.find_nothing()
    before = driver.wait()

    driver.listen()

    assert driver.wait() == before


def test_a_failed_claim_is_tried_again_at_the_time_given() -> None:
    driver = Driver()

    driver.dispatcher.claim_failed(driver.claim(), retry_at=driver.now + 0.7)
    pause = driver.wait()
    driver.now += 0.7

    assert pause == pytest.approx(0.7)
    assert driver.claim().queue == "q"


# limits and turns


def test_no_more_is_claimed_than_there_are_free_slots() -> None:
    driver = Driver(concurrency=10)

    first = driver.take(4)
    driver.wake()
    second = driver.take(6)

    assert (first.limit, second.limit) == (10, 6)
    assert driver.wait() is None  # before the next fact


def test_a_freed_slot_is_filled() -> None:
    driver = Driver(concurrency=2)
    driver.take(2)
    before = driver.wait()

    driver.end(1)

    assert (before, driver.claim().limit) == (None, 1)


def test_a_claim_never_asks_for_more_than_its_limit() -> None:
    driver = Driver(concurrency=1000, claim_limit=300)

    limits = [driver.take(300).limit for _ in range(3)]

    assert limits == [300, 300, 300]
    assert driver.claim().limit == 100


def test_a_full_claim_is_followed_by_another() -> None:
    driver = Driver(concurrency=3)
    driver.take(3)
    driver.finish(3)

    assert driver.claim().limit == 3


def test_a_claim_that_brought_less_is_not_repeated() -> None:
    driver = Driver(concurrency=3)

    driver.take(2)

    assert driver.wait() == pytest.approx(0.5)


def test_busy_queues_take_turns() -> None:
    driver = Driver("a", "b", "c", concurrency=1)
    order = []

    for _ in range(7):
        order.append(driver.take(1).queue)
        driver.now += 1
        driver.finish(1)

    assert order == ["a", "b", "c", "a", "b", "c", "a"]


def test_a_queue_that_wakes_up_goes_before_one_that_was_just_served() -> None:
    driver = Driver("busy", "quiet", concurrency=1)
    driver.take(1)
    driver.finish(1)
    assert driver.take(0).queue == "quiet"
    driver.now += 0.01
    assert driver.take(1).queue == "busy"
    driver.finish(1)

    driver.wake("quiet")

    assert driver.claim().queue == "quiet"


def test_while_outcomes_are_not_written_claims_stop() -> None:
    # twice the slots and a claim's limit may be held
    driver = Driver(concurrency=10, claim_limit=30)
    held = 0
    while held < 1000 and isinstance(step := driver.next(), Claim):
        driver.answer(step, step.limit)
        held += step.limit
        driver.now += 1
        driver.end(step.limit)

    before = driver.wait()
    driver.dispatcher.settled(1)

    assert (held, before) == (50, None)
    assert driver.claim().limit == 10


# prefetch


def test_jobs_that_end_fast_are_claimed_ahead_as_many_as_start_within_a_tenth_of_a_second() -> None:
    driver = Driver(concurrency=10)

    # 10 every 5 ms: 2,000 a second, of which 200 start within 100 ms (and the rate is still settling)
    driver.hurry(each=10, every=0.005)
    step = driver.claim()

    assert step.prefetch
    assert 150 <= step.limit <= 200


def test_jobs_that_take_their_time_are_not_claimed_ahead() -> None:
    driver = Driver(concurrency=10)

    # ten slots, a second each
    for _ in range(10):
        step = driver.take(10)
        driver.now += 1
        driver.finish(10)

    assert (step.limit, step.prefetch) == (10, False)
    assert driver.claim() == Claim("q", 10, prefetch=False, look_ahead=True)


def test_what_is_claimed_ahead_is_not_topped_up_before_half_of_it_has_started() -> None:
    driver = Driver(concurrency=10)
    driver.hurry()
    full = driver.claim()
    driver.answer(full, full.limit)

    driver.finish(full.limit // 2 - 1)
    before = driver.wait()
    driver.finish(2)

    assert (before, driver.claim().prefetch) == (None, True)


def test_a_rate_that_is_long_past_counts_no_more() -> None:
    # or a burst of quick jobs in the morning takes hundreds of slow ones from other workers at noon
    driver = Driver(concurrency=10)
    driver.hurry(each=100)
    before = driver.dispatcher.target(driver.now)

    driver.now += 3600

    assert before > 1000
    assert driver.claim() == Claim("q", 10, prefetch=False, look_ahead=True)
    assert driver.dispatcher.target(driver.now) == 10


def test_the_first_slow_jobs_after_quick_ones_are_few() -> None:
    driver = Driver(concurrency=10)
    driver.hurry(each=100)
    driver.now += 60

    driver.take(10)
    before = driver.wait()
    driver.now += 10
    driver.finish(1)

    assert before is None
    assert driver.claim() == Claim("q", 1, prefetch=False, look_ahead=True)


def test_slots_do_not_stay_idle_because_a_little_more_than_the_slots_may_be_open() -> None:
    # 125 a second: 12 may be open for 10 slots. With 8 open no claim ahead is due, but 2 slots are free
    driver = Driver(concurrency=10)
    driver.hurry(each=5, every=0.04)
    ahead = driver.claim()
    driver.answer(ahead, ahead.limit)

    driver.finish(4)

    assert (ahead.limit, ahead.prefetch) == (12, True)
    assert driver.claim() == Claim("q", 2, prefetch=False, look_ahead=True)


# last attempts


def test_a_claim_ahead_that_brought_less_is_followed_by_one_for_free_slots() -> None:
    driver = Driver(concurrency=10)
    driver.hurry()

    ahead = driver.take(0)
    free = driver.take(0)

    assert (ahead.prefetch, free) == (True, Claim("q", 10, prefetch=False, look_ahead=True))
    assert driver.wait() is not None


def test_a_claim_for_free_slots_waits_for_a_free_slot() -> None:
    driver = Driver(concurrency=10)
    driver.hurry()
    driver.take(30)  # less than asked for: last attempts may be left

    before = driver.wait()
    driver.finish(20)
    full = driver.wait()
    driver.finish(1)

    assert (before, full) == (None, None)
    assert driver.claim() == Claim("q", 1, prefetch=False, look_ahead=True)


@pytest.mark.parametrize("queues", [("a",), ("a", "b"), ("a", "b", "c")])
def test_while_claiming_ahead_there_is_a_claim_for_free_slots_every_quarter_of_a_second(
    queues: tuple[str, ...],
) -> None:
    driver = Driver(*queues, concurrency=10)
    driver.hurry(each=100)
    free: dict[str, list[float]] = {queue: [] for queue in queues}

    while driver.now < 1006:
        step = driver.claim()
        driver.answer(step, step.limit)
        if not step.prefetch:
            free[step.queue].append(driver.now)
        driver.now += 0.01
        driver.finish(step.limit)

    # one every 0.25 s, each queue in its turn, and the time of a claim beside
    everything = sorted(time for times in free.values() for time in times)
    assert longest_gap(everything) <= 0.25 + 0.011
    assert all(longest_gap(times) <= len(queues) * (0.25 + 0.011) for times in free.values())


def longest_gap(times: list[float]) -> float:
    return max(later - earlier for earlier, later in pairwise(times))


def test_last_attempts_of_a_quiet_queue_are_claimed_however_busy_the_others_are() -> None:
    driver = Driver("busy", "quiet", concurrency=10)
    driver.hurry(each=100)
    # "quiet" has one job, at its last attempt: a claim ahead never brings it
    driver.wake("quiet")
    claims: list[Claim] = []

    for _ in range(10):
        step = driver.claim()
        claims.append(step)
        if step.queue == "quiet":
            driver.answer(step, 0 if step.prefetch else 1)
        else:
            driver.answer(step, step.limit)
        driver.now += 0.005
        if driver.dispatcher.open:
            driver.finish(driver.dispatcher.open)

    assert any(step.queue == "quiet" and not step.prefetch for step in claims)


def test_last_attempts_of_a_busy_queue_are_claimed_however_often_quiet_queues_wake_up() -> None:
    driver = Driver("busy", "quiet", "silent", concurrency=10)
    driver.hurry(each=100)
    free: list[float] = [driver.now]

    for number in range(400):
        if number % 10 == 0:
            driver.wake(("quiet", "silent")[number // 10 % 2])
        step = driver.claim()
        driver.answer(step, step.limit if step.queue == "busy" else 0)
        if step.queue == "busy" and not step.prefetch:
            free.append(driver.now)
        driver.now += 0.005
        driver.finish(driver.dispatcher.open)

    # 0.25 s for each queue that is due with it, and the claims between
    assert driver.now - free[0] > 1.5
    assert longest_gap([*free, driver.now]) <= 3 * 0.25 + 0.02


# the end


def test_a_stopped_dispatcher_claims_nothing_whatever_it_is_told() -> None:
    driver = Driver()
    step = driver.claim()

    driver.dispatcher.stop()
    driver.answer(step, 3)
    driver.wake()
    driver.listen()
    driver.finish(3)
    driver.now += 100

    assert driver.next() == Wait(None)


def test_drained_is_only_when_every_queue_was_found_empty_and_nothing_is_held() -> None:
    driver = Driver("a", "b")
    seen = [driver.dispatcher.drained]

    driver.take(2)
    seen.append(driver.dispatcher.drained)
    driver.take(0)
    seen.append(driver.dispatcher.drained)
    driver.end(2)
    seen.append(driver.dispatcher.drained)
    driver.dispatcher.settled(2)
    seen.append(driver.dispatcher.drained)

    assert seen == [False, False, False, False, True]


def test_a_wake_up_during_the_last_claim_is_not_drained() -> None:
    driver = Driver()
    step = driver.claim()

    driver.wake()
    driver.answer(step, 0)
    before = driver.dispatcher.drained
    driver.take(0)

    assert (before, driver.dispatcher.drained) == (False, True)


def test_a_job_that_is_due_later_does_not_keep_the_queue_from_being_drained() -> None:
    driver = Driver()
    step = driver.claim()

    driver.wake(due_in=60)
    driver.answer(step, 0)

    assert driver.dispatcher.drained


def test_a_full_claim_after_an_empty_one_is_not_drained() -> None:
    driver = Driver(concurrency=1)
    driver.take(0)
    driver.wake(due_in=0.1)
    driver.now += 0.1

    driver.take(1)
    driver.finish(1)

    assert not driver.dispatcher.drained


def test_a_failed_claim_after_an_empty_one_is_not_drained() -> None:
    driver = Driver()
    driver.take(0)
    driver.wake(due_in=0.1)
    driver.now += 0.1

    driver.dispatcher.claim_failed(driver.claim(), retry_at=driver.now + 1)

    assert not driver.dispatcher.drained


def test_a_claim_ahead_that_found_nothing_is_not_drained() -> None:
    driver = Driver()
    driver.hurry()
    step = driver.take(0)

    assert step.prefetch
    assert not driver.dispatcher.drained


# -- a thousand worlds


# -- an end of its own


def test_once_claims_every_queue_once_whatever_it_is_told_later() -> None:
    driver = Driver("a", "b", "c", once=True)

    claimed = [driver.take(1).queue for _ in "abc"]
    driver.wake("a")
    driver.wake(None)
    driver.listen()
    driver.now += 100
    driver.listen(alive=False)
    driver.now += 100

    assert sorted(claimed) == ["a", "b", "c"]
    assert driver.wait() is None
    assert not driver.dispatcher.drained
    driver.finish(3)
    assert driver.dispatcher.drained


def test_once_tries_a_failed_claim_again() -> None:
    driver = Driver("a", once=True)

    driver.dispatcher.claim_failed(driver.claim(), retry_at=driver.now + 1)
    driver.now += 1

    assert driver.claim().queue == "a"


def test_a_queue_that_found_no_slot_still_has_its_one_claim() -> None:
    driver = Driver("a", "b", concurrency=2, once=True)

    first = driver.take(2)
    waits = driver.wait()
    driver.finish(1)
    second = driver.claim()

    assert waits is None
    assert {first.queue, second.queue} == {"a", "b"}
    assert second.limit == 1


def test_no_more_jobs_are_claimed_than_the_budget_and_then_nothing() -> None:
    driver = Driver(concurrency=10, budget=13)

    first = driver.take(10)
    driver.finish(10)
    second = driver.take(3)
    driver.now += 100

    assert (first.limit, second.limit) == (10, 3)
    assert driver.wait() is None
    assert not driver.dispatcher.spent
    driver.finish(3)
    assert driver.dispatcher.spent


def test_claiming_ahead_stays_within_the_budget() -> None:
    driver = Driver(concurrency=10, budget=1000)
    total = 0

    for _ in range(400):
        while isinstance(step := driver.next(), Claim):
            driver.answer(step, step.limit)
            total += step.limit
        driver.now += 0.005
        driver.finish(min(20, driver.dispatcher.open))

    assert total == 1000


class Violation(AssertionError):
    """A world came to something that must not be."""


@dataclass(slots=True, eq=False)
class Job:
    queue: str
    due: float
    duration: float
    last: bool = False  # at its last attempt: a claim ahead leaves it
    returns: int = 0  # how often it is retried
    delay: float = 0.0
    lost: bool = False


Make = Callable[..., Dispatcher]


@dataclass(slots=True)
class Plan:
    """What kind of world it is."""

    queues: list[str]
    concurrency: int
    claim_limit: int
    poll: float
    claim_latency: float  # seconds at most, of a claim and of a look-ahead alike
    settle_latency: float
    lost: float  # the share of wake-ups that do not arrive while they should
    failing: float  # the share of claims, and of look-aheads, that fail
    endless: dict[str, float]  # queue -> until when it never runs dry


class World:
    """A worker's dispatcher among queues, slots, a settle lane and other workers. Raises `Violation`.

    What it demands:

    - A claim asks for no more than there are free slots, or (prefetch) than the rate seen allows, never
      for more than the limit of a claim, and for nothing while too much is held or after `stop`.
    - A queue that the dispatcher was told to have a due job is claimed as soon as there is room and its
      turn comes; one that it was not told of is found by the poll. A last attempt is not left behind,
      however busy the queues are.
    - Claims that bring nothing have a cause each: a wake-up, a claim before that brought something, a
      failure, or the poll.
    - `drained` is said only when nothing is held and every queue was found empty.
    - Everything ends, and then the dispatcher only polls.

    The look-ahead answers what becomes due after the *claim* looked.
    """

    def __init__(self, seed: int, make: Make = Dispatcher) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.timer = inf
        self.sequence = count()
        self.events: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self.steps = 0
        plan = self.plan = self._endless_plan() if seed % 8 == 0 else self._plan()
        # the database
        self.future: dict[str, int] = dict.fromkeys(plan.queues, 0)
        self.dues: dict[str, list[float]] = {queue: [] for queue in plan.queues}
        self.ready: dict[str, list[Job]] = {queue: [] for queue in plan.queues}
        self.left = 0
        # the worker
        self.busy = False  # a claim or a look-ahead is under way
        self.changed = True
        self.listening = False
        self.deaf_since = 0.0
        self.stopped = False
        self.buffer: deque[Job] = deque()
        self.running: dict[Job, None] = {}
        self.outcomes: list[Job] = []
        self.settling = False
        # of an endless queue: jobs that end at once, known by their number alone
        self.waiting_drops = 0
        self.ended_drops = 0
        self.open = 0
        self.held = 0
        # what is watched
        self.told: dict[str, float | None] = dict.fromkeys(plan.queues)
        self.hungry: dict[str, float | None] = dict.fromkeys(plan.queues)
        self.memory: dict[str, int] = dict.fromkeys(plan.queues, 0)
        self.not_before: dict[str, float] = dict.fromkeys(plan.queues, 0.0)
        self.found_empty: dict[str, bool] = dict.fromkeys(plan.queues, False)
        self.causes: dict[str, int] = dict.fromkeys(plan.queues, 0)
        self.empty: dict[str, int] = dict.fromkeys(plan.queues, 0)
        self.recent: deque[tuple[float, int]] = deque()
        self.in_window = 0
        self.peak = 0
        self.last_end = 0.0
        self.witnesses: dict[Job, float] = {}  # -> by when it must be claimed
        # a round over the queues, twice (ahead, and for free slots), behind a claim that is under way
        self.prompt = (2 * len(plan.queues) + 2) * 2 * (plan.claim_latency + 0.001)
        if plan.endless:
            self._populate_endless()
        else:
            self._populate()
        self.dispatcher = make(
            queues=plan.queues,
            concurrency=plan.concurrency,
            poll=plan.poll,
            now=0.0,
            claim_limit=plan.claim_limit,
        )

    # -- what happens

    def _plan(self) -> Plan:
        choose = self.random.choice
        return Plan(
            queues=["a", "b", "c"][: choose((1, 1, 2, 3))],
            concurrency=choose((1, 1, 2, 3, 5, 10, 30)),
            claim_limit=choose((2, 5, 20, 500, 500)),
            poll=choose((0.5, 1.0, 5.0)),
            claim_latency=choose((0.001, 0.005, 0.05, 0.2)),
            settle_latency=choose((0.001, 0.01, 0.3, 2.0)),
            lost=choose((0.0, 0.0, 0.0, 0.3, 1.0)),
            failing=choose((0.0, 0.0, 0.1, 0.3)),
            endless={},
        )

    def _endless_plan(self) -> Plan:
        choose = self.random.choice
        queues = ["a", "b", "c"][: choose((1, 2, 3))]
        return Plan(
            queues=queues,
            concurrency=choose((2, 5, 10)),
            claim_limit=choose((20, 50, 500)),
            poll=choose((0.5, 5.0)),
            claim_latency=choose((0.005, 0.02)),
            settle_latency=choose((0.002, 0.01)),
            lost=0.0,
            failing=0.0,
            endless={choose(queues): 2.6},
        )

    def _populate(self) -> None:
        uniform, choose = self.random.uniform, self.random.choice
        last = choose((0.0, 0.1, 1.0))
        returning = choose((0.0, 0.2))
        start = 0.0
        for _ in range(self.random.randint(4, 10)):
            start += choose((0.0, 0.05, 2.0, 15.0)) * uniform(0.5, 1)
            kind = choose((0, 0, 1, 2, 3))
            spread = choose((0.0, 0.0, 0.01, 1.0, 8.0))
            queue = choose(self.plan.queues)
            burst = [
                Job(
                    queue,
                    start + spread * uniform(0.2, 1),
                    (0.0, uniform(0, 0.02), uniform(0, 1), choose((0.0, 0.001, 0.5, 3.0, 8.0)))[kind],
                    last=self.random.random() < last,
                    returns=self.random.randint(0, 2) if self.random.random() < returning else 0,
                    delay=choose((0.0, 0.3, 3.0)),
                )
                for _ in range(choose((1, 2, 10, 40) if kind > 1 else (1, 5, 40, 80)))
            ]
            self.left += len(burst)
            if self.random.random() < 0.6:
                self._at(start, self._enqueued, burst)
                continue
            # one transaction each, now close together (so that a claim is under way), now with a pause
            for job in burst:
                start += uniform(0, choose((1, 1, 30))) * self.plan.claim_latency
                job.due = start + choose((0.0, 0.0, uniform(0, 1))) * spread
                self._at(start, self._enqueued, [job])
        for _ in range(self.random.randint(0, 4)):
            self._at(uniform(0, start + 5), self._stolen, choose(self.plan.queues))
            self._at(uniform(0, start + 5), self._lease_lost, None)
        if self.random.random() < 0.7:
            self._at(uniform(0, 0.1), self._listening, True)
            for _ in range(self.random.randint(0, 2)):
                self._at(uniform(0, start + 20), self._listening, False)
                self._at(uniform(0, start + 20), self._listening, True)
        if self.random.random() < 0.1:
            self._at(uniform(0, start + 5), self._stop, None)

    def _populate_endless(self) -> None:
        """One queue never runs dry: do the others, and what a claim ahead leaves, come to their turn?"""
        self._at(0.01, self._listening, True)
        for queue, ends in self.plan.endless.items():
            self._at(0.02, self._wake, (queue, 0.0))
            self._at(ends, self._dry, queue)
        for queue in self.plan.queues:
            witnesses = [Job(queue, 1.0, 0.01, last=True), Job(queue, 1.0, 0.01)]
            self.left += len(witnesses)
            self._at(1.0, self._enqueued, witnesses)
            # a claim for free slots every 0.25 s, the queues in turn
            self.witnesses.update((job, 1.0 + len(self.plan.queues) * 0.25 + 0.3) for job in witnesses)

    def _at(self, time: float, happen: Callable[[Any], None], what: Any) -> None:
        heappush(self.events, (time, next(self.sequence), happen, what))

    def _after(self, latency: float, happen: Callable[[Any], None], what: Any) -> None:
        self._at(self.now + 0.0002 + self.random.random() * latency, happen, what)

    # -- other people

    def _enqueued(self, burst: list[Job]) -> None:
        """A transaction commits; its trigger announces the earliest of its jobs."""
        for job in burst:
            self._waits(job)
        if self.listening and self.random.random() >= self.plan.lost:
            # told by another clock
            due_in = min(job.due for job in burst) - self.now
            if due_in > 0:
                due_in += self.random.uniform(-0.002, 0.002)
            self._after(0.003, self._wake, (burst[0].queue if self.random.random() < 0.9 else None, due_in))

    def _waits(self, job: Job) -> None:
        if job.due <= self.now:
            self.ready[job.queue].append(job)
        else:
            heappush(self.dues[job.queue], job.due)
            self.future[job.queue] += 1
            self._at(job.due, self._became_due, job)

    def _became_due(self, job: Job) -> None:
        """By the database's clock: nobody is told."""
        heappop(self.dues[job.queue])
        self.future[job.queue] -= 1
        self.ready[job.queue].append(job)

    def _stolen(self, queue: str) -> None:
        """Another worker is faster."""
        if self.ready[queue]:
            self.ready[queue].pop(self.random.randrange(len(self.ready[queue])))
            self.left -= 1

    def _dry(self, queue: str) -> None:
        del self.plan.endless[queue]

    # -- the worker, in the manner of worker.loop

    def _wake(self, what: tuple[str | None, float]) -> None:
        queue, due_in = what
        self.changed = True
        self.dispatcher.woken(queue, now=self.now, due_in=due_in)
        for each in self.plan.queues if queue is None else [queue]:
            self.causes[each] += 1
            if due_in <= 0:
                self._tell(each)
            else:
                self._at(self.now + due_in, self._tell_late, (each, self.memory[each]))

    def _tell(self, queue: str) -> None:
        """From here on the dispatcher knows of a due job, if there is one."""
        if self.told[queue] is None:
            self.told[queue] = self.now

    def _tell_late(self, what: tuple[str, int]) -> None:
        queue, memory = what
        if memory == self.memory[queue]:
            self._tell(queue)

    def _listening(self, alive: bool) -> None:
        self.changed = True
        if alive != self.listening:
            for queue in self.plan.queues:
                self.causes[queue] += 1
                if alive:
                    self._tell(queue)
            if not alive:
                self.deaf_since = self.now
        self.listening = alive
        self.dispatcher.listening(alive, now=self.now)

    def _stop(self, _: None) -> None:
        self.stopped = self.changed = True
        self.dispatcher.stop()

    def _ask(self) -> None:
        self.changed = False
        step = self.dispatcher.next(self.now)
        if isinstance(step, Claim):
            self._check_claim(step)
            self.busy = True
            self.timer = inf
            self.told[step.queue] = None
            self._after(self.plan.claim_latency / 2, self._looked, step)
        elif step.until is None:
            self.timer = inf
        elif step.until <= self.now:
            raise Violation(f"told at {self.now} to wait until {step.until}")
        else:
            self.timer = step.until

    def _looked(self, step: Claim) -> None:
        """The claim's statement looks at the rows; its answer takes a while."""
        if self.random.random() < self.plan.failing:
            self._after(self.plan.claim_latency / 2, self._failed, step)
            return
        self.hungry[step.queue] = None
        ready = self.ready[step.queue]
        jobs = [job for job in ready if not (step.prefetch and job.last)][: step.limit]
        if jobs:
            taken = set(jobs)
            self.ready[step.queue] = [job for job in ready if job not in taken]
        drops = step.limit - len(jobs) if step.queue in self.plan.endless else 0
        self._after(self.plan.claim_latency / 2, self._answered, (step, jobs, drops, self.now))

    def _failed(self, step: Claim) -> None:
        retry_at = self.now + self.random.uniform(0.2, 1.0)
        self.dispatcher.claim_failed(step, retry_at=retry_at)
        self.causes[step.queue] += 1
        self.not_before[step.queue] = retry_at
        self.found_empty[step.queue] = False
        self._tell(step.queue)
        self.busy = False
        self.changed = True

    def _answered(self, what: tuple[Claim, list[Job], int, float]) -> None:
        step, jobs, drops, looked = what
        queue, got = step.queue, len(jobs) + drops
        self.dispatcher.claimed(step, got=got, now=self.now, spread=self.random.random())
        self.open += got
        self.held += got
        short = got < step.limit
        self.found_empty[queue] = short and not step.prefetch
        if not self.found_empty[queue]:
            self._tell(queue)
        if got:
            self.causes[queue] += 1
        else:
            self._check_empty(queue)
        if self.witnesses:
            for job in jobs:
                self.witnesses.pop(job, None)
        self.buffer.extend(jobs)
        self.waiting_drops += drops
        self._start()
        self._check_counts()
        if step.look_ahead and short:
            self._after(self.plan.claim_latency, self._looked_ahead, (queue, looked))
        else:
            self.busy = False
            self.changed = True

    def _looked_ahead(self, what: tuple[str, float]) -> None:
        queue, looked = what
        self.busy = False
        self.changed = True
        if self.random.random() < self.plan.failing:
            # nobody knows any more what was to be found by it: the poll must do
            self.memory[queue] += 1
            self.told[queue] = None
            return
        if self.ready[queue] and self.ready[queue][-1].due > looked:
            self._wake((queue, 0.0))
        elif self.dues[queue]:
            self._wake((queue, self.dues[queue][0] - self.now))

    def _start(self) -> None:
        burst = []
        while self.buffer and len(self.running) < self.plan.concurrency:
            job = self.buffer.popleft()
            if job.lost:
                continue
            if job.duration:
                self.running[job] = None
                self._at(self.now + job.duration, self._finished, job)
            else:
                burst.append(job)
        drops = 0
        if len(self.running) < self.plan.concurrency:
            drops, self.waiting_drops = self.waiting_drops, 0
        if burst or drops:
            self._at(self.now + 0.0001, self._ended, (burst, drops))

    def _finished(self, job: Job) -> None:
        if not job.lost:
            del self.running[job]
            self._ended(([job], 0))

    def _ended(self, what: tuple[list[Job], int]) -> None:
        burst, drops = what
        burst = [job for job in burst if not job.lost]
        self._count_ends(len(burst) + drops)
        self.outcomes += burst
        self.ended_drops += drops
        self._start()
        if not self.settling:
            self._settle()

    def _count_ends(self, number: int) -> None:
        self.open -= number
        self.dispatcher.ended(number, now=self.now)
        self.changed = True
        self.last_end = self.now
        self.recent.append((self.now, number))
        self.in_window += number
        while self.recent[0][0] < self.now - 0.05:
            self.in_window -= self.recent.popleft()[1]
        self.peak = max(self.peak, self.in_window)

    def _settle(self) -> None:
        self.settling = bool(self.outcomes or self.ended_drops)
        if self.settling:
            batch, self.outcomes = self.outcomes, []
            drops, self.ended_drops = self.ended_drops, 0
            self._after(self.plan.settle_latency, self._settled, (batch, drops))

    def _settled(self, what: tuple[list[Job], int]) -> None:
        batch, drops = what
        for job in batch:
            if not job.returns:
                self.left -= 1
                continue
            again = replace(job, due=self.now + job.delay, returns=job.returns - 1)
            self._waits(again)
            self._wake((job.queue, job.delay))
        self.held -= len(batch) + drops
        self.dispatcher.settled(len(batch) + drops)
        self.changed = True
        self._check_counts()
        self._settle()

    def _lease_lost(self, _: None) -> None:
        """One that runs or waits for its slot belongs to another worker now."""
        candidates = [*self.running, *(job for job in self.buffer if not job.lost)]
        if candidates:
            job = self.random.choice(candidates)
            job.lost = True
            self.running.pop(job, None)
            self.left -= 1
            self.held -= 1
            self._count_ends(1)
            self.dispatcher.settled(1)
            self._start()

    # -- the run

    def run(self) -> None:
        while not self._is_over():
            self._step()
        if self.stopped:
            return
        # quiet from now on: every queue is polled and nothing else (`_check_empty`)
        self.plan.failing = 0.0
        ends = self.now + 1.25 * (max(self.plan.poll, 30.0) if self.listening else self.plan.poll) + 1
        while min(self.events[0][0] if self.events else inf, self.timer) < ends:
            self._step()
        if not (self.busy or self.stopped) and (self.timer == inf or not self.dispatcher.drained):
            raise Violation(f"not quiet at the end: drained {self.dispatcher.drained}, timer {self.timer}")

    def _is_over(self) -> bool:
        if self.busy or self.held or self.steps == 0:
            return False
        return self.stopped or (self.left == 0 and not self.plan.endless)

    def _step(self) -> None:
        self.steps += 1
        if self.steps > 100_000:
            raise Violation("no end in sight")
        event = self.events[0][0] if self.events else inf
        if event <= self.timer:
            if event == inf:
                raise Violation(f"nothing will happen any more, and {self.left} jobs are left")
            self.now, _, happen, what = heappop(self.events)
            happen(what)
        else:
            self.now, self.timer = self.timer, inf
            self.changed = True
        if self.changed and not self.busy:
            self._ask()
        self._check_hunger()

    # -- what is demanded

    def _check_claim(self, step: Claim) -> None:
        plan = self.plan
        if self.stopped:
            raise Violation("claims while stopping")
        if not 1 <= step.limit <= plan.claim_limit:
            raise Violation(f"asks for {step.limit}, the limit is {plan.claim_limit}")
        free = plan.concurrency - self.open
        if not step.prefetch and step.limit > free:
            raise Violation(f"asks for {step.limit} with {free} free slots, last attempts included")
        # A rate is a mean of ends over 50 ms or more, so never above 40 times the most in any 50 ms. What
        # is older than a silence is halved every 50 ms, but for the ends since the last measurement.
        silence = self.now - self.last_end
        allowed = 4 * self.peak * 0.5 ** (silence / 0.05) + 0.1 * self.peak / max(silence, 0.025) + 1
        if self.open + step.limit > max(plan.concurrency, allowed):
            raise Violation(f"{self.open} open, asks for {step.limit}: at most {allowed} start in time")
        if self.held >= 2 * max(plan.concurrency, allowed) + plan.claim_limit:
            raise Violation(f"claims although {self.held} are held")

    def _check_counts(self) -> None:
        if (self.dispatcher.open, self.dispatcher.held) != (self.open, self.held):
            raise Violation(f"counts {self.dispatcher.open} open of {self.open}")
        if self.dispatcher.drained and (self.held or not all(self.found_empty.values())):
            raise Violation(f"drained, with {self.held} held and found empty {self.found_empty}")

    def _check_empty(self, queue: str) -> None:
        self.empty[queue] += 1
        polls = self.now / (0.75 * 0.5) + 2
        # twice: a claim ahead and one for free slots
        if self.empty[queue] > 2 * (self.causes[queue] + polls):
            raise Violation(f"{self.empty[queue]} claims for nothing, {self.causes[queue]} causes")

    def _check_hunger(self) -> None:
        plan, now = self.plan, self.now
        room = self.open < plan.concurrency and self.held < 2 * plan.concurrency + plan.claim_limit
        for queue in plan.queues:
            if not self.ready[queue] and queue not in plan.endless:
                self.hungry[queue] = self.told[queue] = None
            elif self.stopped or not room or now < self.not_before[queue]:
                self.hungry[queue] = None
            else:
                self._check_queue(queue)
        for job, by in self.witnesses.items():
            if now > by:
                raise Violation(f"{job} is still not claimed")

    def _check_queue(self, queue: str) -> None:
        since = self.hungry[queue]
        if since is None:
            self.hungry[queue] = self.now
            return
        told = self.told[queue]
        if told is not None and self.now > max(since, told) + self.prompt:
            raise Violation(f"told of {queue} at {told}, room since {since}, no claim by {self.now}")
        if self.listening:
            found_by = since + 1.25 * max(self.plan.poll, 30.0)
        else:
            found_by = max(since, self.deaf_since) + 1.25 * self.plan.poll
        if self.now > found_by + self.prompt:
            raise Violation(f"{queue} has had due jobs and room since {since}, not found by {self.now}")


WORLDS = 1_000


def worlds(make: Make = Dispatcher, number: int = WORLDS) -> Iterator[World]:
    """Run to their end, one after the other."""
    for seed in range(number):
        world = World(seed, make)
        try:
            world.run()
        except Violation as violation:
            violation.add_note(f"seed {seed}: {world.plan}")
            raise
        yield world


def test_no_random_world_breaks_a_promise() -> None:
    steps = sum(world.steps for world in worlds())

    assert steps > 100 * WORLDS


# -- the worlds see what is broken


class ForgetsWakeUpsDuringAClaim(Dispatcher):
    def woken(self, queue: str | None, *, now: float, due_in: float = 0.0) -> None:
        under_way = [q for q in self._queues.values() if q.due == inf]
        super().woken(queue, now=now, due_in=due_in)
        for q in under_way:
            q.due = inf


class IgnoresWhatIsOpen(Dispatcher):
    def _room(self, now: float, owed: bool) -> tuple[int, bool]:
        return min(self.concurrency, self._claim_limit), False


class IgnoresWhatIsHeld(Dispatcher):
    def _room(self, now: float, owed: bool) -> tuple[int, bool]:
        held, self.held = self.held, 0
        room = super()._room(now, owed)
        self.held = held
        return room


class NeverPolls(Dispatcher):
    def claimed(self, claim: Claim, *, got: int, now: float, spread: float) -> None:
        super().claimed(claim, got=got, now=now, spread=spread)
        q = self._queues[claim.queue]
        if q.due == q.poll_at:
            q.due = inf


class PollsWithoutAPause(Dispatcher):
    """A claim that brought nothing leaves its queue due."""

    def claimed(self, claim: Claim, *, got: int, now: float, spread: float) -> None:
        super().claimed(claim, got=got, now=now, spread=spread)
        self._queues[claim.queue].due = now


class PollsAsIfItListened(Dispatcher):
    """The poll is not brought forward when wake-ups stop arriving."""

    def listening(self, alive: bool, *, now: float) -> None:
        if alive:
            super().listening(alive, now=now)
        self._listening = alive


class MissesWhatItMissed(Dispatcher):
    """What arrived while nobody listened is left to the poll."""

    def listening(self, alive: bool, *, now: float) -> None:
        if not alive:
            super().listening(alive, now=now)
        self._listening = alive


class ClaimsWhileStopping(Dispatcher):
    def stop(self) -> None:
        pass


class ClaimsLastAttemptsAhead(Dispatcher):
    def next(self, now: float) -> Claim | Wait:
        step = super().next(now)
        return replace(step, prefetch=False) if isinstance(step, Claim) else step


class NeverClaimsForFreeSlots(Dispatcher):
    def _room(self, now: float, owed: bool) -> tuple[int, bool]:
        return super()._room(now, False)


class ForgetsThatLastAttemptsAreLeft(Dispatcher):
    """A claim ahead that brought less is taken for the last word."""

    def claimed(self, claim: Claim, *, got: int, now: float, spread: float) -> None:
        super().claimed(replace(claim, prefetch=False), got=got, now=now, spread=spread)


class ClaimsForFreeSlotsOfTheFirstInLine(Dispatcher):
    """And so never of a quiet queue beside a busy one."""

    def claimed(self, claim: Claim, *, got: int, now: float, spread: float) -> None:
        super().claimed(claim, got=got, now=now, spread=spread)
        if self._queues[claim.queue].asked == -inf:
            self._free_slot_claim = -inf
        for q in self._queues.values():
            q.asked = now


class OneClockForAllQueues(Dispatcher):
    """Quiet queues keep a busy one from its claim for free slots."""

    def claimed(self, claim: Claim, *, got: int, now: float, spread: float) -> None:
        super().claimed(claim, got=got, now=now, spread=spread)
        for q in self._queues.values():
            q.asked = max(q.asked, self._free_slot_claim) if q.asked > -inf else -inf


class TakesNoTurns(Dispatcher):
    def next(self, now: float) -> Claim | Wait:
        self._turn.sort(key=lambda q: q.name)
        for q in self._turn:
            q.asked = self._free_slot_claim
        return super().next(now)


class LeavesSlotsIdle(Dispatcher):
    """While a little more than the slots may be open, it waits for half of that."""

    def _room(self, now: float, owed: bool) -> tuple[int, bool]:
        room, prefetch = super()._room(now, owed)
        if not prefetch and not owed and self.target(now) > self.concurrency:
            return 0, False
        return room, prefetch


class NeverForgetsARate(Dispatcher):
    def _rate_at(self, now: float) -> float:
        passed = now - self._ended_since
        if self._ended and passed >= 0.05:
            return (self._rate + self._ended / passed) / 2
        return self._rate


class KeepsDrainedDuringAClaim(Dispatcher):
    def next(self, now: float) -> Claim | Wait:
        drained = {q.name for q in self._turn if q.drained}
        step = super().next(now)
        for name in drained:
            self._queues[name].drained = True
        return step


class ForgetsTimesToldAtAClaim(Dispatcher):
    def next(self, now: float) -> Claim | Wait:
        step = super().next(now)
        if isinstance(step, Claim):
            self._queues[step.queue].at = inf
        return step


class ForgetsTheLookAheadOfAFullClaim(Dispatcher):
    def claimed(self, claim: Claim, *, got: int, now: float, spread: float) -> None:
        super().claimed(claim, got=got, now=now, spread=spread)
        self._queues[claim.queue].look_ahead = False


class ForgetsTheLookAheadOfAFailedClaim(Dispatcher):
    def claim_failed(self, claim: Claim, *, retry_at: float) -> None:
        super().claim_failed(replace(claim, look_ahead=False), retry_at=retry_at)


class LooksAheadOnce(Dispatcher):
    """What a look-ahead found to be due by now is claimed without another."""

    def woken(self, queue: str | None, *, now: float, due_in: float = 0.0) -> None:
        self._looking = None
        super().woken(queue, now=now, due_in=due_in)


BROKEN: list[type[Dispatcher]] = [
    ForgetsWakeUpsDuringAClaim,
    IgnoresWhatIsOpen,
    IgnoresWhatIsHeld,
    NeverPolls,
    PollsWithoutAPause,
    PollsAsIfItListened,
    MissesWhatItMissed,
    ClaimsWhileStopping,
    ClaimsLastAttemptsAhead,
    NeverClaimsForFreeSlots,
    ForgetsThatLastAttemptsAreLeft,
    ClaimsForFreeSlotsOfTheFirstInLine,
    OneClockForAllQueues,
    TakesNoTurns,
    LeavesSlotsIdle,
    NeverForgetsARate,
    KeepsDrainedDuringAClaim,
    ForgetsTimesToldAtAClaim,
    ForgetsTheLookAheadOfAFullClaim,
    ForgetsTheLookAheadOfAFailedClaim,
    LooksAheadOnce,
]


@pytest.mark.parametrize("broken", BROKEN, ids=lambda dispatcher: dispatcher.__name__)
def test_a_broken_dispatcher_is_caught_by_the_worlds(broken: type[Dispatcher]) -> None:
    with pytest.raises(Violation):
        for _ in worlds(broken):
            pass
