"""Which rows the database refused lately, and when to try each again. Pure: the clock is an argument."""

from dataclasses import dataclass, field

__all__ = ["Refusals"]


@dataclass(slots=True)
class Refusals:
    """How long to leave a refused row alone: a minute, doubling to an hour.

    >>> refusals = Refusals()
    >>> refusals.add("mail", 7, now=0.0), refusals.add("mail", 7, now=60.0)
    (60.0, 120.0)
    >>> refusals.left_alone("mail", now=100.0), refusals.left_alone("mail", now=180.0)
    ([7], [])
    """

    first: float = 60.0
    longest: float = 3600.0
    _rows: dict[str, dict[int, tuple[float, float]]] = field(default_factory=dict)

    def add(self, queue: str, id_: int, *, now: float) -> float:
        """Refused (again): for how many seconds it is left alone."""
        rows = self._rows.setdefault(queue, {})
        before = rows.get(id_)
        pause = self.first if before is None else min(before[1] * 2, self.longest)
        rows[id_] = (now + pause, pause)
        return pause

    def left_alone(self, queue: str, *, now: float) -> list[int]:
        """Those to leave out now. One that is not refused again within another pause is forgotten."""
        rows = self._rows.get(queue)
        if not rows:
            return []
        for id_ in [id_ for id_, (until, pause) in rows.items() if until + pause < now]:
            del rows[id_]
        return [id_ for id_, (until, _) in rows.items() if now < until]
