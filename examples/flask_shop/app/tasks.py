"""What runs in the background. Views import the tasks to enqueue them; the worker runs them."""

from flask import current_app, render_template

from app.models import Job, Order, Receipt, note
from sqla_jobs import JobContext, Jobs, Retry

jobs = Jobs(Job)


@jobs.task(queue="mail", retry=Retry(max_attempts=8))
def send_receipt(ctx: JobContext, order: Order) -> None:
    """The order was loaded in ctx.session; worker.py gives the application context."""
    text = render_template("receipt.txt", order=order)
    current_app.logger.info("mail to %s", order.customer)  # outside the database: at least once
    # from here on exactly once: it commits together with the job's completion, or not at all
    ctx.session.add(Receipt(order=order, text=text))
    note(f"receipt for order {order.id} sent")  # through db.session, which is ctx.session here
