"""The lines that keep the guarantees, and how each is broken. One text occurs exactly once in its file."""

from typing import NamedTuple

__all__ = ["MUTANTS", "Mutant"]


class Mutant(NamedTuple):
    """One broken line: which guarantee it keeps, and the tests of which one must go red."""

    name: str
    guarantee: int
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


_PG = "tests/postgres/test_"
FENCE = (f"{_PG}fence.py",)
INTERLEAVINGS = (f"{_PG}interleavings.py",)
SETTLE = (f"{_PG}settle.py", f"{_PG}fence.py")
CLAIM = (f"{_PG}claim.py",)
LEASE = (f"{_PG}lease.py", f"{_PG}fence.py")
RESCUE = (f"{_PG}rescue.py", f"{_PG}fence.py", f"{_PG}refused_rows.py")
REFUSED = (f"{_PG}refused_rows.py",)
OUTBOX = (f"{_PG}outbox.py",)
KEYS = (f"{_PG}unique_keys.py",)
WORKER = (f"{_PG}worker.py", f"{_PG}worker_faults.py")
ENDS = (f"{_PG}worker_ends.py",)
LIMITS = (f"{_PG}time_limits.py",)
SESSION = (f"{_PG}handler_session.py", f"{_PG}worker_faults.py")
DOOR = (f"{_PG}door.py",)
SCHEMA = (f"{_PG}schema.py", f"{_PG}models.py")
DISPATCH = ("tests/pure/test_dispatch.py",)
LIFECYCLE = ("tests/pure/test_lifecycle.py",)
BOOK = ("tests/pure/test_leases.py",)
RETRY = ("tests/pure/test_retry.py",)

_S = "sqla_jobs/store/"
_W = "sqla_jobs/worker/"
_O = "sqla_jobs/outbox/"
_C = "sqla_jobs/core/"


def _mutant(name: str, guarantee: int, file: str, old: str, new: str, tests: tuple[str, ...]) -> Mutant:
    return Mutant(name, guarantee, file, old, new, tests)


MUTANTS: tuple[Mutant, ...] = (
    # -- 1: atomic enqueue
    _mutant("a call outlives its savepoint", 1, _O + "session.py",
            "return _goes_on(it) if it.placeholder is None else it.placeholder in session",
            "return True", OUTBOX),
    _mutant("nothing is left for a commit without a second event", 1, _O + "session.py",
            "        if _wanted(session, it):\n            _hold(session, it)", "        pass", OUTBOX),
    _mutant("the list is emptied before anything was written", 1, _O + "session.py",
            "    puts[:] = [it for it in puts if _wanted(session, it)]\n    # What raises",
            "    puts = [it for it in puts if _wanted(session, it)]\n    session.info[_PUTS] = []\n    # What raises",
            OUTBOX),
    _mutant("a call of a flush listener is forgotten while others wait", 1, _O + "session.py",
            "        puts.append(it)\n        session.info[_PUTS] = puts", "        pass", OUTBOX),
    _mutant("placeholders stay and are written as rows", 1, _O + "session.py",
            "            session.expunge(it.placeholder)\n", "", OUTBOX),
    _mutant("an entity of no session is taken for pending", 1, _O + "entities.py",
            "if state.identity is None and reference.entity not in session:", "if False:", OUTBOX),
    _mutant("a pending entity's key is read before its flush", 1, _O + "session.py",
            "if is_pending(session, reference)]", "if False]", OUTBOX),
    _mutant("identities go to the wrong calls", 1, _O + "rows.py",
            "for row, id_ in zip(rows, sorted(ids), strict=True):",
            "for row, id_ in zip(rows, sorted(ids, reverse=True), strict=True):", OUTBOX),
    _mutant("rows are not sorted below the insert", 1, _O + "rows.py",
            '.order_by(literal_column("place", BigInteger))',
            '.order_by(literal_column("place", BigInteger).desc())', OUTBOX),
    _mutant("two-phase transactions notify", 1, _O + "rows.py",
            "    if session.twophase:", "    if False:", OUTBOX),
    _mutant("a duplicate key breaks the transaction", 1, _O + "rows.py",
            "    return statement.on_conflict_do_nothing(\n"
            "        index_elements=[jobs.c.queue, jobs.c.unique_key], index_where=text(LIVE_KEYS)\n    )",
            "    return statement", KEYS),
    _mutant("keys are written in call order", 1, _O + "rows.py",
            "ordered = [first[key] for key in sorted(first)]", "ordered = list(first.values())", KEYS),
    _mutant("a second try keeps the keys of the first", 1, _O + "rows.py",
            "savepoint.rollback() if vanished else savepoint.commit()", "savepoint.commit()", KEYS),
    _mutant("a vanished holder is taken for a conflict", 1, _O + "rows.py",
            "            vanished.append(row)\n            continue", "            continue", KEYS),
    _mutant("a running holder is told as waiting", 1, _O + "rows.py",
            'handle._conflict = "running" if holder[1] == "running" else "waiting"',
            'handle._conflict = "waiting"', KEYS),
    _mutant("a key is free while its job runs", 1, "sqla_jobs/models.py",
            "status IN ('ready', 'blocked', 'running')\"", "status IN ('ready', 'blocked')\"", KEYS),
    # -- 2: at least once
    _mutant("expired leases are not found", 2, _S + "rescue.py",
            "            c.locked_until < STATEMENT_TIME,\n",
            "            c.locked_until < func.to_timestamp(0),\n", RESCUE),
    _mutant("an outcome without an answer is dropped", 2, _W + "settling.py",
            "                self._outcomes += entries\n                complete = False",
            "                complete = False", INTERLEAVINGS),
    _mutant("a busy row's outcome is dropped", 2, _W + "settling.py",
            "        self._waiting -= 1\n        self._outcomes += entries\n", "        self._waiting -= 1\n", INTERLEAVINGS),
    _mutant("a claim whose answer was lost is not looked for", 2, _W + "claims.py",
            "            self._orphans[step.queue] = [now, now + 10.0]", "            pass",
            INTERLEAVINGS),
    _mutant("jobs that run are taken for orphans", 2, _S + "claim.py",
            "            c.id != func.all(IDS),\n", "", CLAIM),
    _mutant("orphans of others are released", 2, _S + "claim.py",
            "            c.locked_by == OWNER,\n            c.id != func.all(IDS)",
            "            c.id != func.all(IDS)", CLAIM),
    _mutant("jobs that are due later are claimed", 2, _S + "claim.py",
            "        c.run_at <= STATEMENT_TIME,\n", "", CLAIM),
    _mutant("rows that somebody holds are waited for", 2, _S + "claim.py",
            "        .limit(LIMIT)\n        .with_for_update(skip_locked=True, key_share=True)",
            "        .limit(LIMIT)\n        .with_for_update(key_share=True)", CLAIM),
    _mutant("a claim takes more than its limit", 2, _S + "claim.py",
            "c.id == any_(func.array(chosen.scalar_subquery())))",
            "c.id >= any_(func.array(chosen.scalar_subquery())))", CLAIM),
    _mutant("the trigger is silent", 2, "sqla_jobs/schema.py",
            "FROM fresh WHERE status = 'ready' GROUP BY", "FROM fresh WHERE status = 'done' GROUP BY", SCHEMA),
    _mutant("a job that is ready again wakes nobody", 2, _S + "settle.py",
            "select(func.array_agg(held.c.id), announced(stayed)).add_cte(moved)",
            "select(func.array_agg(held.c.id), select(func.count()).select_from(stayed).scalar_subquery())"
            ".add_cte(moved)", SETTLE),
    _mutant("a retry keeps its old due time", 2, _S + "settle.py",
            "run_at=case((held.c.final == READY, run_at), else_=c.run_at)", "run_at=c.run_at", SETTLE),
    _mutant("leases are never due", 2, _C + "leases.py",
            "limit = now + self._lease / 3", "limit = now - self._lease / 3", BOOK),
    _mutant("a lease is thought to begin when the answer came", 2, _C + "leases.py",
            "        end = sent + self._lease\n        for lease in leases:\n            self._ends[lease] = end",
            "        end = sent + 2 * self._lease\n        for lease in leases:\n            self._ends[lease] = end",
            BOOK),
    _mutant("a closed lease comes back by a late prolongation", 2, _C + "leases.py",
            "            if lease in self._ends:\n", "            if True:\n", BOOK),
    _mutant("a wake-up during a claim is forgotten", 2, _C + "dispatch.py",
            "            q.due = min(q.due, at)\n", "            q.due = at if q.due < inf else q.due\n", DISPATCH),
    _mutant("a queue is never polled", 2, _C + "dispatch.py",
            "        q.due = min(q.due, q.poll_at)\n\n    def claim_failed", "\n    def claim_failed", DISPATCH),
    _mutant("a failed claim is not tried again", 2, _C + "dispatch.py",
            "        q.due = min(q.due, retry_at)\n", "", DISPATCH),
    _mutant("a dead side loop stays dead", 2, _W + "loop.py",
            "                return await loop()\n            except Exception as error:",
            "                return await loop()\n            except ZeroDivisionError as error:",
            ("tests/postgres/test_guarantees.py",)),
    # -- 3: one winner
    _mutant("settle: any token", 3, _S + "settle.py",
            "        jobs.c.fencing_token == outcome.c.token,\n", "", FENCE),
    _mutant("settle: any owner", 3, _S + "settle.py",
            "    return and_(own, jobs.c.locked_by == OWNER)", "    return own", FENCE),
    _mutant("settle: any queue", 3, _S + "settle.py",
            "        jobs.c.queue == QUEUE,\n        jobs.c.status == RUNNING,\n        jobs.c.id == outcome.c.id",
            "        jobs.c.status == RUNNING,\n        jobs.c.id == outcome.c.id", FENCE),
    _mutant("settle: any status", 3, _S + "settle.py",
            "        jobs.c.status == RUNNING,\n        jobs.c.id == outcome.c.id",
            "        jobs.c.id == outcome.c.id", FENCE),
    _mutant("rescue: leases that have not ended", 3, _S + "settle.py",
            "jobs.c.locked_by == outcome.c.owner, jobs.c.locked_until < STATEMENT_TIME)",
            "jobs.c.locked_by == outcome.c.owner)", FENCE),
    _mutant("rescue: any owner", 3, _S + "settle.py",
            "and_(own, jobs.c.locked_by == outcome.c.owner, jobs.c.locked_until < STATEMENT_TIME)",
            "and_(own, jobs.c.locked_until < STATEMENT_TIME)", FENCE),
    _mutant("prolong: any token", 3, _S + "lease.py",
            "            c.fencing_token == given.c.token,\n            c.locked_by == OWNER,",
            "            c.locked_by == OWNER,", LEASE),
    _mutant("prolong: any owner", 3, _S + "lease.py",
            "            c.fencing_token == given.c.token,\n            c.locked_by == OWNER,",
            "            c.fencing_token == given.c.token,", LEASE),
    _mutant("the token does not grow", 3, _S + "claim.py",
            'fencing_token=func.least(c.fencing_token, literal_column("9223372036854775806"))\n'
            '            + literal_column("1"),', "fencing_token=c.fencing_token,", CLAIM),
    _mutant("what is locked is called lost", 3, _S + "lease.py",
            "(prolonged.busy if still_ours else prolonged.lost).append(each)",
            "prolonged.lost.append(each)", LEASE),
    _mutant("what is locked is called stale", 3, _S + "settle.py",
            "        elif any(_still_ours(row, entry[0]) for row in places):\n            settled.busy.append(entry)\n",
            "", SETTLE),
    _mutant("a lost answer is called stale", 3, _S + "settle.py",
            "        elif ended := [row for row in places if _ended_by_us(row, entry[0])]:\n"
            "            settled.written.append((entry[0], _as_written(entry[1], JobStatus(ended[0][3]))))\n", "",
            SETTLE),
    _mutant("what an earlier call wrote is told as what came after it", 3, _S + "settle.py",
            "return verdict if verdict.status is status else Verdict(status)", "return verdict", FENCE),
    _mutant("a rescue of our job is taken for our own end", 3, _S + "settle.py",
            'return not last.get("lost") and {owner', "return {owner", SETTLE),
    _mutant("another owner's end under our token is taken for ours", 3, _S + "settle.py",
            '{owner, last.get("worker")} <= {lease.owner, None}', "True", SETTLE),
    _mutant("two starts of a worker share their identity", 3, _W + "loop.py",
            ":{os.getpid()}:{uuid4().hex[:12]}", ":{os.getpid()}",
            ("tests/postgres/test_guarantees.py",)),
    _mutant("a lost lease does not cancel its handler", 3, _W + "custody.py",
            "            self._cut(run)  # before the cancel, which a driver passes on to a server that may not answer\n"
            "            run.cancel()\n", "", WORKER),
    # -- 4: exactly once in the database
    _mutant("a handler's settle is not fenced", 4, _W + "session.py",
            "    if settled is None:\n        abandon(session)", "    if False:\n        abandon(session)", SESSION),
    _mutant("a handler's writes stay when it fails", 4, _W + "session.py",
            "            elif outer is not self._source:\n                outer.rollback()",
            "            elif outer is not self._source:\n                outer.commit()", SESSION),
    _mutant("the engine's isolation level holds", 4, _W + "session.py",
            'self._source.connect().execution_options(isolation_level="READ COMMITTED")',
            "self._source.connect()", SESSION),
    _mutant("a handler's commit is a real one", 4, _W + "session.py",
            'join_transaction_mode="create_savepoint")', 'join_transaction_mode="control_fully")', SESSION),
    _mutant("a closed session's work is lost in silence", 4, _W + "session.py",
            "            self._discarded = True", "            pass", SESSION),
    _mutant("the end of the worker's transaction is not noticed", 4, _W + "session.py",
            "if self.outer is not None and self._begun is not None and not self._is_in(self.outer):",
            "if False:", SESSION),
    _mutant("a session is used after its handler", 4, _W + "session.py",
            '    """No use after the handler\'s end: nobody would ever commit it."""\n        self._over = True',
            '    """No use after the handler\'s end: nobody would ever commit it."""', SESSION),
    _mutant("a job is not deleted when it is archived", 4, _S + "settle.py",
            ".where(jobs.c.queue == QUEUE, jobs.c.id.in_(select(held.c.id)))",
            ".where(jobs.c.queue == QUEUE, jobs.c.id.in_(select(held.c.id)), literal_column('false', Boolean))",
            SETTLE),
    # -- 5: bounded attempts
    _mutant("a claim does not count its attempt", 5, _S + "claim.py",
            'attempts=func.least(c.attempts, literal_column("2147483646")) + literal_column("1"),',
            "attempts=c.attempts,", CLAIM),
    _mutant("prefetch takes last attempts", 5, _S + "claim.py",
            'c.attempts < c.max_attempts - literal_column("1")),', 'c.attempts < c.max_attempts),', CLAIM),
    _mutant("a rescue does not look at max_attempts", 5, _C + "lifecycle.py",
            "if delay is None or attempt >= max_attempts:", "if delay is None:", LIFECYCLE),
    _mutant("the last attempt is tried once more", 5, _C + "lifecycle.py",
            "attempt >= max_attempts:", "attempt > max_attempts:", LIFECYCLE),
    _mutant("a snooze costs an attempt", 5, _C + "lifecycle.py",
            "return Verdict(JobStatus.READY, attempts=-1, delay=max(delay, SNOOZE_FLOOR))",
            "return Verdict(JobStatus.READY, delay=max(delay, SNOOZE_FLOOR))", LIFECYCLE),
    _mutant("a snooze has no floor", 5, _C + "lifecycle.py",
            "delay=max(delay, SNOOZE_FLOOR))", "delay=delay)", LIFECYCLE),
    _mutant("a release costs an attempt", 5, _C + "lifecycle.py",
            "return Verdict(JobStatus.READY, attempts=-1, delay=delay)",
            "return Verdict(JobStatus.READY, delay=delay)", LIFECYCLE),
    _mutant("attempts are not given back in the row", 5, _S + "settle.py",
            "attempts=c.attempts + held.c.given_back,", "attempts=c.attempts,", SETTLE),
    _mutant("a stuck attempt is given back uncounted", 5, _W + "custody.py",
            "        if run.timed_out:\n", "        if False:\n", LIMITS),
    _mutant("a prefetch waits for no free slot", 5, _C + "dispatch.py",
            "            return min(target - self.open, most), True",
            "            return min(target - self.open, most), False", DISPATCH),
    _mutant("a last attempt waits for a thread", 5, _W + "custody.py",
            "        if self._fewer_threads:\n", "        if False:\n", ENDS),
    _mutant("one more than max_jobs", 5, _C + "dispatch.py",
            "most = int(min(self._claim_limit, self._budget))", "most = self._claim_limit", DISPATCH),
    # -- 6: nothing poisons the loop
    # (run.py's own `except BaseException` around a handler is the first of two nets: without it the consumer's,
    # which the next mutant takes away, gives the same outcome)
    _mutant("a consumer dies with its job", 6, _W + "slots.py",
            "            except BaseException as error:  # a consumer that dies is a slot that is gone",
            "            except ZeroDivisionError as error:  # a consumer that dies is a slot that is gone",
            (f"{_PG}guarantees.py",)),
    _mutant("one refused value fails its batch", 6, _S + "settle.py",
            "        if not is_rows_fault(error):\n            raise\n        if len(entries) == 1:",
            "        raise\n        if len(entries) == 1:", SETTLE),
    _mutant("an error text that PostgreSQL refuses is sent", 6, _W + "failure.py",
            'text.replace("\\0", "\\ufffd")', "text", WORKER),
    _mutant("an error text has no limit", 6, _W + "failure.py",
            "    if len(encoded) > LIMIT:", "    if False:", ("tests/pure/test_failure.py",)),
    _mutant("a refused outcome is not degraded", 6, _W + "settling.py",
            "            if degraded != verdict:", "            if False:", RESCUE),
    _mutant("a row that cannot be archived is refused", 6, _S + "settle.py",
            "        if error is not None:\n            _settle_in_place(connection, tables, part[0], error, settled, "
            "retention)\n",
            "        if error is not None:\n            settled.refused.append((part[0], error))\n", WORKER),
    _mutant("a row that cannot be archived fails its handler's work", 6, _S + "settle.py",
            "            raise\n        connection.execute(_BACK_TO_IT)", "            raise\n        raise", REFUSED),
    _mutant("a row that cannot be archived stops a rescue", 6, _S + "settle.py",
            "            _settle_in_place(connection, tables, part[0], error, settled, retention, expired=True)\n",
            "            settled.refused.append((part[0], error))\n", RESCUE),
    _mutant("a row that cannot be archived stops an expiry", 6, _S + "rescue.py",
            "            raise\n        if len(late) == 1:", "            raise\n        raise\n        if len(late) == 1:",
            RESCUE),
    _mutant("a row that cannot be written at all stops an expiry", 6, _S + "rescue.py",
            "        expired.refused.append(Refused(id_, kind, brief(error)))", "        raise", RESCUE),
    _mutant("refused rows hide the leases behind them", 6, _W + "maintenance.py",
            "            refused += [lease.id for (lease, _), _ in settled.refused]", "            return", RESCUE),
    _mutant("refused rows hide the expired ones behind them", 6, _W + "maintenance.py",
            "            refused += [each.id for each in expired.refused]", "            return", RESCUE),
    _mutant("an unknown kind is held", 6, _W + "custody.py",
            "                self.give_back(run, delay=_UNKNOWN_KIND_DELAY, reason=\"unknown kind\")",
            "                pass", WORKER),
    _mutant("a result that cannot be stored fails its job", 6, _W + "run.py",
            "            return Returned(run.task.results.text(value))\n        except Exception as error:",
            "            return Returned(run.task.results.text(value))\n        except ZeroDivisionError as error:",
            (f"{_PG}around.py",)),
    _mutant("a user's retry rule that raises is believed", 6, _W + "run.py",
            "        with suppress(BaseException):\n            delay = retry.wait_after",
            "        with suppress(ZeroDivisionError):\n            delay = retry.wait_after",
            (f"{_PG}guarantees.py",)),
    _mutant("backoff overflows", 6, _C + "retry.py",
            "        except OverflowError:\n            return self.cap", "        except ZeroDivisionError:\n            return self.cap",
            RETRY),
    _mutant("the cap holds before the jitter", 6, _C + "retry.py",
            "if seconds < self.cap.total_seconds() else self.cap", "if True else self.cap", RETRY),
    # -- 7: clean stop
    _mutant("a stopped worker claims on", 7, _C + "dispatch.py",
            "        if self._stopping:\n            return Wait(None)\n", "", DISPATCH),
    _mutant("what a late claim brings is run", 7, _W + "custody.py",
            "        if self._closed:\n            for run in runs:\n                self.give_back(run)\n"
            "            return\n", "", ("tests/postgres/test_guarantees.py",)),
    _mutant("unstarted jobs are not given back", 7, _W + "custody.py",
            "        for run in self._slots.close():\n            self.give_back(run)",
            "        self._slots.close()", WORKER),
    _mutant("what does not end is not given back", 7, _W + "custody.py",
            "            self.give_back(run)  # a thread that cannot be stopped", "            pass  # a thread", WORKER),
    _mutant("a drain's cancellation counts as a failure", 7, _W + "run.py",
            "            case asyncio.CancelledError() if run.draining:\n                return Released()\n", "",
            WORKER),
    _mutant("a cancelled worker leaves its loops", 7, _W + "loop.py",
            "            cancelled = error  # whoever runs us in a task of theirs: the same as a stop\n"
            "            self.stop()",
            "            raise", ENDS),
    _mutant("leases are not prolonged during a drain", 7, _W + "loop.py",
            "        code = await self._drain(claims)\n",
            "        await self._custody.keeper.stop()\n        code = await self._drain(claims)\n",
            ("tests/postgres/test_guarantees.py",)),
)  # fmt: skip
