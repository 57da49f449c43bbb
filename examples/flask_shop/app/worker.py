"""For the worker what wsgi.py is for the web: `python -m sqla_jobs.worker --app app.worker:jobs`."""

from collections.abc import Iterator
from contextlib import contextmanager

from app import create_app
from app.models import db
from app.tasks import jobs
from sqla_jobs import JobContext

app = create_app()


@jobs.around
@contextmanager
def in_the_application(ctx: JobContext) -> Iterator[None]:
    """Around every attempt: an application context, in which `db.session` is the job's own session."""
    with app.app_context():
        db.session.registry.set(ctx.session)
        try:
            yield
        finally:
            # the context's end closes what is registered; this session the worker commits, after us
            db.session.registry.clear()
