"""The engine, and the session of a request."""

import os
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import Depends
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

engine = create_async_engine(os.environ["DATABASE_URL"])
new_session = async_sessionmaker(engine)


async def get_session() -> AsyncIterator[AsyncSession]:
    """One transaction: committed when the view returns, rolled back when it raises."""
    async with new_session.begin() as session:
        yield session


# scope="function" is not decoration. By default FastAPI runs what comes after a dependency's `yield` when the
# response has been sent: the client would read 201, and the COMMIT could still fail. With it the commit comes
# first, and a failed one is a 500.
Session = Annotated[AsyncSession, Depends(get_session, scope="function")]
