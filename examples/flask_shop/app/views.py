"""The requests. An order and the job that sends its receipt are one transaction."""

from flask import Blueprint, abort, render_template, request
from flask.typing import ResponseReturnValue

from app.models import Order, db, note
from app.tasks import jobs, send_receipt
from sqla_jobs import enqueue

shop = Blueprint("shop", __name__)


class PaymentDeclined(Exception):
    pass


@shop.post("/orders")
def place_order() -> ResponseReturnValue:
    asked = request.get_json()
    order = Order(customer=asked["customer"], item=asked["item"])
    db.session.add(order)
    job = enqueue(db.session, send_receipt, order)  # a plain call; the order needs no id yet
    note(f"{order.customer} ordered")
    charge(asked["card"])  # raises: no commit, so no order, no job, no note
    db.session.commit()
    return {"order": order.id, "job": job.id}, 201


@shop.errorhandler(PaymentDeclined)
def payment_declined(error: PaymentDeclined) -> ResponseReturnValue:
    db.session.rollback()
    return render_template("declined.html", reason=str(error)), 402


@shop.get("/jobs/<int:job_id>")
def show_job(job_id: int) -> ResponseReturnValue:
    record = jobs.find(db.session, job_id)  # not db.session.get(Job, ...): a done job is in the archive
    if record is None:
        abort(404)
    return {"status": record.status, "attempts": record.attempts, "error": record.last_error}


def charge(card: str) -> None:
    """Stands for a payment service."""
    if card.startswith("0000"):
        raise PaymentDeclined("your bank says no")
