"""How long a refused row is left alone."""

from sqla_jobs.core.refusals import Refusals


def test_a_row_that_is_refused_again_and_again_is_left_alone_twice_as_long_up_to_an_hour() -> None:
    refusals, now, pauses = Refusals(), 0.0, []
    for _ in range(8):
        pauses.append(refusals.add("mail", 7, now=now))
        now += pauses[-1]

    assert pauses == [60, 120, 240, 480, 960, 1920, 3600, 3600]


def test_a_row_is_left_alone_in_its_queue_until_its_time_has_come() -> None:
    refusals = Refusals()
    refusals.add("mail", 7, now=100.0)

    assert refusals.left_alone("mail", now=159.0) == [7]
    assert refusals.left_alone("mail", now=160.0) == []
    assert refusals.left_alone("other", now=159.0) == []


def test_a_row_that_is_not_refused_again_is_forgotten() -> None:
    refusals = Refusals()
    refusals.add("mail", 7, now=0.0)

    assert refusals.left_alone("mail", now=121.0) == []
    assert refusals.add("mail", 7, now=122.0) == 60.0
