"""core.leases: what is held, what is to be prolonged, and when to look again."""

import pytest

from sqla_jobs.core.leases import Lease, LeaseBook

A, B, C = (Lease("mail", number, 1, "worker") for number in (1, 2, 3))


def opened(*leases: Lease, lease: float = 60.0, sent: float = 100.0) -> LeaseBook:
    book = LeaseBook(lease=lease)
    book.opened(leases, sent=sent)
    return book


# -- due


@pytest.mark.parametrize(
    ("now", "due"),
    [
        (100.0, []),
        (139.9, []),
        (140.0, [A]),  # a third of 60 s is left
        (159.9, [A]),
        (1000.0, [A]),  # ended is still due: the database may say that it is ours
    ],
)
def test_a_lease_is_due_when_a_third_of_it_is_left(now: float, due: list[Lease]) -> None:
    book = opened(A)

    assert book.due(now) == due


def test_each_lease_is_due_by_its_own_claim() -> None:
    book = opened(A, sent=100.0)
    book.opened([B, C], sent=110.0)

    assert (book.due(140.0), book.due(150.0)) == ([A], [A, B, C])


def test_a_lease_is_counted_from_when_the_claim_was_sent() -> None:
    # counted from the answer, a slow claim would be thought to last longer than the database says
    book = LeaseBook(lease=60)

    book.opened([A], sent=100.0)

    assert (book.ended(159.9), book.ended(160.0)) == ([], [A])


# -- ended


@pytest.mark.parametrize(("now", "ended"), [(140.0, []), (159.999, []), (160.0, [A]), (200.0, [A])])
def test_a_lease_has_ended_at_its_end_and_not_before(now: float, ended: list[Lease]) -> None:
    book = opened(A)

    assert book.ended(now) == ended


# -- prolonged


def test_a_prolonged_lease_ends_later_counted_from_when_the_statement_was_sent() -> None:
    book = opened(A, B)

    book.prolonged([A], sent=141.0)

    assert (book.due(180.9), book.due(181.0)) == ([B], [A, B])
    assert (book.ended(160.0), book.ended(201.0)) == ([B], [A, B])


def test_a_lease_that_was_closed_while_its_prolongation_was_under_way_stays_closed() -> None:
    book = opened(A, B)

    book.closed([A])
    book.prolonged([A, B], sent=141.0)

    assert A not in book
    assert (len(book), book.due(1000.0), book.ended(1000.0)) == (1, [B], [B])


def test_another_attempt_of_the_same_job_is_another_lease() -> None:
    book = opened(A)
    again = A._replace(token=2)
    book.opened([again], sent=150.0)

    book.closed([A])

    assert A not in book
    assert again in book
    assert book.due(190.0) == [again]


# -- closed


def test_a_closed_lease_is_neither_due_nor_ended() -> None:
    book = opened(A, B)

    book.closed([A])

    assert (book.due(1000.0), book.ended(1000.0)) == ([B], [B])


def test_closing_what_is_not_open_changes_nothing() -> None:
    book = opened(A)

    book.closed([B])
    book.closed([A, A])
    book.closed([A])

    assert len(book) == 0


# -- the first end


def test_the_first_end_is_that_of_the_lease_that_was_opened_or_prolonged_first() -> None:
    book = opened(A)
    book.opened([B], sent=105.0)
    ends = [book.first_end()]
    book.prolonged([A], sent=120.0)
    ends.append(book.first_end())
    book.closed([A, B])
    ends.append(book.first_end())

    assert ends == [160.0, 165.0, None]


# -- pause


@pytest.mark.parametrize(
    ("now", "pause"),
    [
        (100.0, 10.0),  # 40 s to go, but never longer than a sixth of a lease
        (130.0, 10.0),
        (131.0, 9.0),
        (139.5, 0.5),
        (140.0, 0.0),
        (500.0, 0.0),  # never negative
    ],
)
def test_the_next_look_is_when_the_first_lease_becomes_due(now: float, pause: float) -> None:
    book = opened(A)
    book.opened([B], sent=105.0)

    assert book.pause(now) == pytest.approx(pause)


def test_with_nothing_open_the_next_look_is_after_a_sixth_of_a_lease() -> None:
    # a lease that is opened meanwhile is not due before two thirds of it have passed
    assert LeaseBook(lease=60).pause(100.0) == 10.0


@pytest.mark.parametrize("lease", [2.0, 3.0, 7.0, 60.0, 86400.0])
def test_a_keeper_that_pauses_as_told_finds_every_lease_due_before_it_ends(lease: float) -> None:
    book = opened(A, lease=lease)
    now = 100.0

    while not book.due(now):
        # a clock has a resolution: what rounds to no pause at all is one tick
        now += max(book.pause(now), 1e-9)

    assert 100.0 + lease * 2 / 3 <= now + 1e-6 <= 100.0 + lease * 2 / 3 + 2e-6
    assert book.ended(now) == []
