"""A log line every ten seconds while something happens, in the manner of vLLM's."""

import asyncio
import logging
import time
from collections.abc import Callable

from jaxkv.core.metrics import EngineSnapshot

logger = logging.getLogger(__name__)

INTERVAL_S = 10.0


def status_line(before: EngineSnapshot, now: EngineSnapshot, seconds: float) -> str | None:
    """What the engine did between two snapshots, and how it stands; None if it did nothing and has nothing to do."""
    if now.steps == before.steps and now.num_finished == before.num_finished and not now.num_running + now.num_waiting:
        return None
    queried = now.queried - before.queried
    hit_rate = f"{(now.hit - before.hit) / queried:.1%} of {queried} tokens" if queried else "nothing queried"
    return (
        f"prompt throughput: {(now.computed_tokens - before.computed_tokens) / seconds:.1f} tokens/s, "
        f"generation throughput: {(now.generated_tokens - before.generated_tokens) / seconds:.1f} tokens/s, "
        f"running: {now.num_running} requests, waiting: {now.num_waiting} requests, "
        f"KV cache usage: {now.kv_cache_usage:.1%}, prefix cache hit rate: {hit_rate}"
    )


async def log_status(snapshot: Callable[[], EngineSnapshot]) -> None:
    """Logs until it is cancelled."""
    before, began = snapshot(), time.monotonic()
    while True:
        await asyncio.sleep(INTERVAL_S)
        now, ended = snapshot(), time.monotonic()
        line = status_line(before, now, ended - began)
        if line is not None:
            logger.info("%s", line)
        before, began = now, ended
