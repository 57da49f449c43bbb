"""A drain of no-op jobs by one worker, beside the floor: a raw psycopg claim-and-delete loop, in one run.

usage: python tests/bench/drain.py [--jobs 20000] [--repeat 3] [--concurrency 10] [--profile]

The two are interleaved on one private server (fsync on), and medians and their ratio are printed. The
worker has every feature on: leases, fence, archive, events, context per job. The floor has none.
"""

import argparse
import asyncio
import cProfile
import os
import platform
import pstats
import resource
import statistics
import time
from collections.abc import Callable
from datetime import timedelta

import psycopg
from sqlalchemy import create_engine, make_url, text
from sqlalchemy.orm import DeclarativeBase

from sqla_jobs.core.retention import Retention
from sqla_jobs.embedded import EmbeddedPostgres
from sqla_jobs.models import JobMixin
from sqla_jobs.tasks import Jobs
from sqla_jobs.worker import Worker

BATCH = 100

RAW_TABLE = """
CREATE TABLE raw_jobs (
  id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, queue text NOT NULL DEFAULT 'default',
  kind text NOT NULL, payload jsonb NOT NULL, status text NOT NULL DEFAULT 'ready',
  priority smallint NOT NULL DEFAULT 0, run_at timestamptz NOT NULL DEFAULT now(),
  attempts int NOT NULL DEFAULT 0, locked_by text, locked_until timestamptz);
CREATE INDEX ON raw_jobs (queue, priority DESC, run_at, id) WHERE status = 'ready';
CREATE INDEX ON raw_jobs (locked_until) WHERE status = 'running';
"""
RAW_CLAIM = """
UPDATE raw_jobs SET status = 'running', attempts = attempts + 1, locked_by = 'w',
  locked_until = now() + interval '60 s'
WHERE id = ANY(ARRAY(SELECT id FROM raw_jobs
  WHERE queue = 'default' AND status = 'ready' AND run_at <= now()
  ORDER BY priority DESC, run_at, id LIMIT %s FOR UPDATE SKIP LOCKED))
RETURNING id, kind, payload, attempts"""
RAW_DONE = "DELETE FROM raw_jobs WHERE id = ANY(%s) AND locked_by = 'w'"


class Base(DeclarativeBase):
    pass


class Job(JobMixin, Base):
    __tablename__ = "jobs"


def tasks(retention: Retention) -> Jobs:
    jobs = Jobs(Job, retention=retention)

    @jobs.task(name="noop")
    async def noop(i: int) -> None:
        pass

    @jobs.task(name="noop_sync")
    def noop_sync(i: int) -> None:
        pass

    return jobs


def fill(connection: psycopg.Connection, table: str, kind: str, count: int) -> None:
    connection.execute(f"TRUNCATE {table}")
    connection.execute(
        f"INSERT INTO {table} (kind, payload) "
        "SELECT %s, jsonb_build_object('i', g) FROM generate_series(1, %s) g",
        (kind, count),
    )
    connection.execute(f"VACUUM ANALYZE {table}")


def cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def raw(url: str, count: int) -> tuple[float, float]:
    with psycopg.connect(url, autocommit=True) as connection:
        fill(connection, "raw_jobs", "noop", count)
        began, cpu_began = time.perf_counter(), cpu()
        left = count
        while left:
            rows = connection.execute(RAW_CLAIM, (BATCH,)).fetchall()
            connection.execute(RAW_DONE, ([row[0] for row in rows],))
            left -= len(rows)
        return count / (time.perf_counter() - began), (cpu() - cpu_began) / count * 1e6


def drain(url: str, count: int, kind: str, retention: Retention, concurrency: int) -> tuple[float, float]:
    with psycopg.connect(url, autocommit=True) as connection:
        fill(connection, "jobs", kind, count)
        connection.execute("TRUNCATE jobs_archive")
    worker = Worker(
        tasks(retention), url=url, concurrency=concurrency, mode="drain", lease=timedelta(seconds=60)
    )
    first: list[float] = []
    worker.events.subscribe(lambda _: first.append(time.perf_counter()) if not first else None, "job.claimed")
    last: list[float] = []
    worker.events.subscribe(lambda _: last.append(time.perf_counter()), "job.settled")
    cpu_began = cpu()
    assert asyncio.run(worker.run()) == 0
    used = cpu() - cpu_began
    engine = create_engine(make_url(url).set(drivername="postgresql+psycopg"))
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT count(*) FROM jobs")) == 0
    engine.dispose()
    return count / (last[-1] - first[0]), used / count * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=20_000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--concurrency", type=int, default=10)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    with EmbeddedPostgres(
        durable=True, settings={"shared_buffers": "512MB", "max_wal_size": "4GB"}
    ) as server:
        url = server.url()
        engine = create_engine(make_url(url).set(drivername="postgresql+psycopg"))
        Base.metadata.create_all(engine)
        engine.dispose()
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(RAW_TABLE)
        print(
            f"PostgreSQL {server.version}, {os.cpu_count()} cores, Python {platform.python_version()}, ",
            end="",
        )
        print(f"{options.jobs} jobs, {options.repeat} interleaved repetitions, fsync on")
        if options.profile:
            profile = cProfile.Profile()
            profile.runcall(drain, url, options.jobs, "noop", Retention(), options.concurrency)
            pstats.Stats(profile).sort_stats("tottime").print_stats(35)
            return
        deleted = Retention(done=timedelta(0))
        runs: dict[str, Callable[[], tuple[float, float]]] = {
            f"raw loop, batch {BATCH}": lambda: raw(url, options.jobs),
            "worker, async, archived": lambda: drain(
                url, options.jobs, "noop", Retention(), options.concurrency
            ),
            "worker, async, deleted": lambda: drain(url, options.jobs, "noop", deleted, options.concurrency),
            "worker, sync, archived": lambda: drain(
                url, options.jobs, "noop_sync", Retention(), options.concurrency
            ),
        }
        results: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
        for _ in range(options.repeat):
            for name, run in runs.items():
                results[name].append(run())
        floor = statistics.median(rate for rate, _ in next(iter(results.values())))
        print(f"{'':28}{'jobs/s':>9}{'spread':>8}{'of floor':>10}{'client us/job':>15}")
        for name, measured in results.items():
            rates = [rate for rate, _ in measured]
            rate = statistics.median(rates)
            spread = (max(rates) - min(rates)) / rate
            us = statistics.median(us for _, us in measured)
            print(f"{name:28}{rate:9,.0f}{spread:8.0%}{rate / floor:10.2f}{us:15.0f}")


if __name__ == "__main__":
    main()
