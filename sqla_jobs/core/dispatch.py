"""What a worker should do next. Pure: no clock, no database, no chance.

The driver tells facts (woken, claimed, ended, settled) and asks `next(now)`: claim so many jobs of a
queue, or wait until a moment. Times are seconds of one monotonic clock. Knows nothing of jobs
themselves, leases or handlers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

__all__ = ["Claim", "Dispatcher", "Wait"]

#: Prefetch only what will start within this many seconds at the rate seen.
WINDOW = 0.1
#: A claim asks for at most this many jobs: decoding more at once would hold the loop too long.
CLAIM_LIMIT = 500
#: While prefetching, jobs at their last attempt are left; this often a claim for free slots takes them,
#: of one queue that is due after the other.
FREE_SLOT_CLAIM_EVERY = 0.25
#: The poll of a queue that had work lately starts here and doubles while it finds nothing.
SHORTEST_POLL = 0.5
#: The longest poll while wake-ups are known to arrive.
LISTENING_POLL = 30.0


@dataclass(frozen=True, slots=True)
class Claim:
    """Claim at most `limit` jobs of `queue`.

    `prefetch`: more than there are free slots, so leave jobs at their last attempt alone: a crash
    beside them would fail them without a start. `look_ahead`: if less than `limit` came, find the next
    due time as well, and tell it by `woken` before asking what to do next.
    """

    queue: str
    limit: int
    prefetch: bool = False
    look_ahead: bool = False


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to claim before `until` (None: before the next fact)."""

    until: float | None


@dataclass(slots=True, eq=False)
class _Queue:
    name: str
    due: float  # when to claim next
    poll_at: float  # when the poll is due; a claim at or after it looks ahead
    asked: float  # when it last had a claim for free slots; -inf: a prefetch may have left last attempts
    gap: float = SHORTEST_POLL
    drained: bool = False  # the last claim brought less than it asked for
    # the first future due time told of. A claim at or after it looks ahead: for the next such time, and
    # because a timer may run a little fast
    at: float = inf
    look_ahead: bool = False  # a look-ahead that was due has not been made, or had to be made again
    over: bool = False  # claimed once, where that is all there is to be


class Dispatcher:
    """Decides when to claim, from which queue and how much.

    Guarantees: never more open jobs (claimed, not ended) than `concurrency` or what the rate seen
    starts within WINDOW; never more held jobs (claimed, not settled) than twice that and two claims; a
    wake-up during a claim leads to another claim; every queue is polled; no slot stays idle beside a
    queue that is due. `once`: every queue is claimed once and then never again. `budget`: so many jobs
    are claimed in all, and not one more.
    """

    def __init__(
        self,
        *,
        queues: Sequence[str],
        concurrency: int,
        poll: float,
        now: float,
        claim_limit: int = CLAIM_LIMIT,
        once: bool = False,
        budget: int | None = None,
    ) -> None:
        self.concurrency = concurrency
        self._once = once
        self._budget = inf if budget is None else budget
        self.open = 0
        self.held = 0
        self._poll = poll
        self._claim_limit = claim_limit
        self._queues = {name: _Queue(name, due=now, poll_at=now, asked=now) for name in queues}
        self._turn = list(self._queues.values())
        self._listening = False
        self._stopping = False
        self._looking: _Queue | None = None  # where the driver looks ahead at this moment
        self._rate = 0.0
        self._ended = 0
        self._ended_since = now
        self._free_slot_claim = now

    # -- facts

    def woken(self, queue: str | None, *, now: float, due_in: float = 0.0) -> None:
        """A job of `queue` (None: of any) is claimable in `due_in` seconds."""
        chosen = self._queues.values() if queue is None else [q] if (q := self._queues.get(queue)) else []
        for q in chosen:
            if q.over:
                continue
            at = now + max(due_in, 0.0)
            q.due = min(q.due, at)
            if due_in > 0:
                q.at = min(q.at, at)
            else:
                q.drained = False
                # what a look-ahead found to be due by now, perhaps: something may come after it
                q.look_ahead = q.look_ahead or q is self._looking

    def listening(self, alive: bool, *, now: float) -> None:
        """Whether wake-ups arrive. What was missed while they did not is looked for at once."""
        if alive and not self._listening:
            for q in self._in_use():
                q.due = q.poll_at = min(q.due, now)
        if self._listening and not alive:
            for q in self._in_use():
                q.poll_at = min(q.poll_at, now + self._poll)
                q.due = min(q.due, q.poll_at)
        self._listening = alive

    def claimed(self, claim: Claim, *, got: int, now: float, spread: float) -> None:
        """A claim brought `got` jobs. `spread` in [0, 1) scatters the polls of many workers."""
        q = self._queues[claim.queue]
        if claim.look_ahead and got < claim.limit:
            self._looking = q
        self.open += got
        self.held += got
        self._budget -= got
        if self._once:
            q.over = q.drained = True
            q.due = inf
            return
        if not claim.prefetch:
            self._free_slot_claim = q.asked = now
        if got:
            q.gap = SHORTEST_POLL
        if got >= claim.limit:
            q.due = now
            q.look_ahead = q.look_ahead or claim.look_ahead  # nobody looks ahead after a full claim
            return
        if claim.prefetch:
            # jobs at their last attempt may have been left: a claim for free slots comes next, and of
            # this queue, however busy the others are
            q.due = now
            q.asked = -inf
            return
        q.due = min(q.due, q.at)
        q.drained = q.due > now  # else a wake-up arrived during the claim
        if claim.look_ahead or got:
            longest = max(self._poll, LISTENING_POLL) if self._listening else self._poll
            gap = min(q.gap, longest)
            q.gap = min(q.gap * 2, longest)
            q.poll_at = now + gap * (0.75 + spread / 2)
        q.due = min(q.due, q.poll_at)

    def claim_failed(self, claim: Claim, *, retry_at: float) -> None:
        """A claim gave no answer; the queue is due again at `retry_at`."""
        q = self._queues[claim.queue]
        q.due = min(q.due, retry_at)
        q.look_ahead = q.look_ahead or claim.look_ahead

    def ended(self, count: int, *, now: float) -> None:
        """So many attempts ended: their slots are free, their outcomes not yet written."""
        self.open -= count
        self._ended += count
        if now - self._ended_since >= WINDOW / 2:
            self._rate = self._rate_at(now)
            self._ended = 0
            self._ended_since = now

    def settled(self, count: int) -> None:
        """So many outcomes are written (or given up)."""
        self.held -= count

    def stop(self) -> None:
        """Claim nothing any more."""
        self._stopping = True

    # -- questions

    @property
    def drained(self) -> bool:
        """Nothing is held and every queue's last claim found less than it asked for."""
        return self.held == 0 and all(q.drained for q in self._turn)

    @property
    def spent(self) -> bool:
        """Nothing is held and the budget is used up."""
        return self.held == 0 and self._budget <= 0

    def target(self, now: float) -> int:
        """How many jobs may be open: the slots, or what the rate seen starts within WINDOW."""
        return max(self.concurrency, int(self._rate_at(now) * WINDOW))

    def next(self, now: float) -> Claim | Wait:
        """What to do now. After a Claim, tell `claimed` or `claim_failed` before asking again."""
        self._looking = None
        if self._stopping:
            return Wait(None)
        due = [q for q in self._turn if q.due <= now]
        if not due:
            first = min(q.due for q in self._turn)
            return Wait(None if first == inf else first)
        # A claim for free slots takes the queue that has waited longest for one, and not the first in line:
        # beside a busy queue, last attempts of another would never be claimed. Nor does one clock for all
        # do: queues that bring little would reset it, and a busy one never come to its turn.
        oldest = min(due, key=_asked)
        owed = (
            now - self._free_slot_claim >= FREE_SLOT_CLAIM_EVERY
            or now - oldest.asked >= FREE_SLOT_CLAIM_EVERY * len(due)
        )
        room, prefetch = self._room(now, owed)
        if not room:
            return Wait(None)
        q = due[0] if prefetch else oldest
        # the one served goes to the end of the line
        self._turn.remove(q)
        self._turn.append(q)
        look_ahead = q.look_ahead or now >= min(q.poll_at, q.at) or not self._listening
        if q.at <= now:
            q.at = inf  # looking ahead finds the next
        q.due = inf
        q.look_ahead = q.drained = False
        return Claim(q.name, room, prefetch, look_ahead)

    def _room(self, now: float, owed: bool) -> tuple[int, bool]:
        """How many jobs to claim, and whether that is more than there are free slots."""
        target = self.target(now)
        most = int(min(self._claim_limit, self._budget))
        if self.held >= 2 * target + self._claim_limit:
            return 0, False  # settles do not keep up: that is the back-pressure
        if target > self.concurrency and not owed and self.open <= target // 2:
            return min(target - self.open, most), True
        # also when a prefetch has to wait for half the buffer: no slot stays idle meanwhile
        return min(max(self.concurrency - self.open, 0), most), False

    def _in_use(self) -> list[_Queue]:
        return [q for q in self._turn if not q.over]

    def _rate_at(self, now: float) -> float:
        """Ends per second. Half of it is forgotten every WINDOW / 2, also while nothing ends."""
        passed = now - self._ended_since
        if passed < WINDOW / 2:
            return self._rate
        kept: float = 0.5 ** (passed / (WINDOW / 2))
        return self._rate * kept + self._ended / passed * (1 - kept)


def _asked(q: _Queue) -> float:
    return q.asked
