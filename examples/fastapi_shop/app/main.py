"""The web application. An order and the job that sends its receipt are one transaction."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, HTTPException
from pydantic import BaseModel

from app.database import Session, engine
from app.models import Order
from app.tasks import jobs, send_receipt
from sqla_jobs import enqueue


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    yield
    await engine.dispose()


app = FastAPI(title="The Tea Shop", lifespan=lifespan)


class NewOrder(BaseModel):
    customer_id: int
    item: str


class PlacedOrder(BaseModel):
    order: int
    job: int


class JobState(BaseModel):
    status: str
    attempts: int
    error: str | None


@app.post("/orders", status_code=201)
async def place_order(asked: NewOrder, session: Session) -> PlacedOrder:
    order = Order(customer_id=asked.customer_id, item=asked.item)
    session.add(order)
    job = enqueue(session, send_receipt, order)  # a plain call; the order needs no id yet
    await session.flush()  # only because the answer names both ids
    if asked.item == "coffee":
        raise HTTPException(422, "we are a tea shop")  # no commit, so no order and no job
    return PlacedOrder(order=order.id, job=job.id)


@app.get("/jobs/{job_id}")
async def show_job(job_id: int, session: Session) -> JobState:
    record = await session.run_sync(jobs.find, job_id)  # live or archived: a done job is not a missing one
    if record is None:
        raise HTTPException(404, f"there is no job {job_id}")
    return JobState(status=record.status, attempts=record.attempts, error=record.last_error)
