"""Customers: they order in several sessions at once, and a ledger remembers how each transaction ended.

The ledger is what the checks believe: it is written by whoever committed or rolled back, and never reads
the database.
"""

from collections.abc import Iterable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Self

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from sqla_jobs.cli.demo.shop import Order, place_order, render

__all__ = ["DECLINED_EVERY", "Cashiers", "Ledger"]

#: One payment in so many is declined, after its job was enqueued.
DECLINED_EVERY = 10
_SESSIONS = 4  # they share the disk's waits: commits of several sessions are flushed together

_NAMES = ("Ada", "Grace", "Zoë", "Søren", "José", "Łucja", "Иван", "美咲")
_ITEMS = (("Espresso machine", 24_900), ("Coffee beans, 1 kg", 1_890), ("Cup", 750), ("Filter papers", 299))


@dataclass(slots=True)
class Ledger:
    """How each transaction ended.

    Committed: the order's id, and the receipt that must follow. Rolled back: the id, and the customer's name.
    """

    committed: dict[int, str] = field(default_factory=dict)
    rolled_back: dict[int, str] = field(default_factory=dict)

    @property
    def written(self) -> int:
        """Transactions that have ended, either way."""
        return len(self.committed) + len(self.rolled_back)


class PaymentDeclined(Exception):
    """Raised in the middle of a transaction, as it happens to real shops."""

    def __init__(self, order_id: int) -> None:
        super().__init__(order_id)
        self.order_id = order_id


class Cashiers:
    """Takes orders in a few threads; each order is one ORM session and one transaction."""

    def __init__(self, engine: Engine) -> None:
        self.ledger = Ledger()
        self._engine = engine
        self._pool = ThreadPoolExecutor(_SESSIONS, thread_name_prefix="cashier")
        self._open: set[Future[None]] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def take(self, numbers: Iterable[int]) -> None:
        """Begin to take the orders with these numbers; returns at once."""
        self._open |= {self._pool.submit(take_order, self._engine, self.ledger, each) for each in numbers}

    def finished(self) -> bool:
        """Whether all orders are written. Raises what went wrong with one."""
        done, self._open = wait(self._open, timeout=0, return_when=FIRST_EXCEPTION)
        for each in done:
            each.result()
        return not self._open


def take_order(engine: Engine, ledger: Ledger, number: int) -> None:
    """One customer's transaction, and its entry in the ledger once it has ended."""
    item, cents = _ITEMS[number % len(_ITEMS)]
    order = Order(customer=f"{_NAMES[number % len(_NAMES)]} {number}", item=item, cents=cents)
    customer = order.customer
    try:
        with Session(engine) as session, session.begin():
            place_order(session, order)
            session.flush()  # order and job are both written, and nobody else can see them
            order_id, receipt = order.id, render(order)
            if number % DECLINED_EVERY == DECLINED_EVERY - 1:
                raise PaymentDeclined(order_id)
    except PaymentDeclined as declined:
        ledger.rolled_back[declined.order_id] = customer
    else:
        ledger.committed[order_id] = receipt
