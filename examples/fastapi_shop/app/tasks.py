"""What runs in the background, in the worker's event loop."""

from app.models import Customer, Job, Order, Receipt
from sqla_jobs import AsyncJobContext, Jobs, Retry

jobs = Jobs(Job)


@jobs.task(queue="mail", retry=Retry(max_attempts=8))
async def send_receipt(ctx: AsyncJobContext, order: Order) -> None:
    # what is lazy elsewhere is awaited here: order.customer would be I/O in the middle of an attribute
    customer = await ctx.session.get_one(Customer, order.customer_id)
    ctx.log.info("mail to %s", customer.name)  # outside the database: at least once
    # exactly once: it commits together with the job's completion, or not at all
    ctx.session.add(Receipt(order_id=order.id, text=f"{customer.name}, thank you for the {order.item}"))
