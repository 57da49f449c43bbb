"""The blocks of docs/how-to/enqueue.md run, in one session, one after the other."""

import re
import subprocess
import sys
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "enqueue.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)

MODELS = """
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqla_jobs import JobMixin
class Base(DeclarativeBase):
    pass
class Job(JobMixin, Base):
    __tablename__ = "background_jobs"
class User(Base):
    __tablename__ = "users"
    id: Mapped[int] = mapped_column(primary_key=True)
"""

BEFORE = """
import os
from sqlalchemy import create_engine, func, select
from sqlalchemy.orm import Session
from sqla_jobs import enqueue, enqueue_many, enqueue_select
from app.models import Base, Job, User
from app.tasks import count_users, jobs, remind
engine = create_engine(os.environ["DATABASE_URL"].replace("postgresql:", "postgresql+psycopg:"))
Base.metadata.create_all(engine)
with Session(engine) as session, session.begin():
    session.add_all([User(id=number) for number in (1, 2, 3)])
    session.flush()
    enqueue(session, remind, session.get_one(User, 1), "monday")
    enqueue(session, count_users.using(unique_key="nightly"), limit=1)
"""

AFTER = """
with Session(engine) as session:
    kinds = session.execute(select(Job.kind, func.count()).group_by(Job.kind).order_by(Job.kind)).all()
    print(kinds)
engine.dispose()
"""


def test_the_page_runs_as_it_stands(empty_database_url: str, tmp_path: Path) -> None:
    files: list[str] = []
    steps: list[str] = []
    for block in BLOCKS:
        (files if block.startswith("# app/") else steps).append(block)
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "models.py").write_text(MODELS)
    for block in files:
        (tmp_path / block.partition("\n")[0].removeprefix("# ")).write_text(block)
    body = "".join(f"    {line}\n" for block in steps for line in block.splitlines())
    (tmp_path / "run.py").write_text(f"{BEFORE}{body}{AFTER}")

    done = subprocess.run(
        [sys.executable, "-W", "error", "run.py"],
        cwd=tmp_path,
        env={"DATABASE_URL": empty_database_url, "PATH": "/usr/bin", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "already waiting",
        "3",
        "[('app.tasks.count_users', 1005), ('app.tasks.remind', 1)]",
    ]
