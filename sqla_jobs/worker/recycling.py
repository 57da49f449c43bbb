"""When a worker has done enough: its memory or its run time has reached a limit.

Watches, and tells why; ends nothing itself. The number of jobs is counted by core.dispatch.
"""

import asyncio
import resource
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

__all__ = ["memory_in_use", "watch"]

#: Memory is looked at this often: a read of /proc, no statement.
_EVERY = 1.0
_STATM = Path("/proc/self/statm")


def memory_in_use() -> int:
    """Bytes of this process's resident memory; where /proc is missing, the most it ever was.

    >>> memory_in_use() > 1_000_000
    True
    """
    with suppress(OSError):
        return int(_STATM.read_bytes().split()[1]) * resource.getpagesize()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


async def watch(
    *,
    max_runtime: timedelta | None,
    max_memory: int | None,
    reached: Callable[[str], None],
    stopping: asyncio.Event,
) -> None:
    """Call `reached` with a reason when a limit is reached, once; ends then, or when `stopping` is set."""
    ends = None if max_runtime is None else time.monotonic() + max_runtime.total_seconds()
    while not stopping.is_set():
        now = time.monotonic()
        if ends is not None and now >= ends:
            reached(f"it has run for {max_runtime}")
            return
        if max_memory is not None and (used := memory_in_use()) >= max_memory:
            reached(f"it uses {used:,} bytes of memory, the limit is {max_memory:,}")
            return
        pause = None if ends is None else ends - now
        if max_memory is not None:
            pause = _EVERY if pause is None else min(pause, _EVERY)
        with suppress(TimeoutError):
            async with asyncio.timeout(pause):
                await stopping.wait()
