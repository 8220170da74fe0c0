"""A scheduler without a model: requests in, plans out, made-up results back."""

import dataclasses
import zlib

from jaxkv.control.executor import ExecutorLimits
from jaxkv.control.scheduler import Scheduler
from jaxkv.control.scheduler_config import SchedulerConfig
from jaxkv.core.plan import RowResult, StepResult, StepTiming
from jaxkv.core.request import Request, SamplingParams

LIMITS = ExecutorLimits(
    num_blocks=101,
    block_size=4,
    max_num_seqs=4,
    max_num_batched_tokens=16,
    max_prefill_seqs=4,
    max_model_len=64,
    max_decode_steps=8,
)


def make(config=SchedulerConfig(), **limits):
    return Scheduler(dataclasses.replace(LIMITS, **limits), config)


def add(scheduler, request_id, prompt, max_tokens=20, priority=0, cache_salt=None, **sampling):
    """`prompt`: token ids, or a length (then it shares nothing with other requests)."""
    if isinstance(prompt, int):
        prompt = [1000 + zlib.crc32(request_id.encode()) % 2**20 * 64 + place for place in range(prompt)]
    params = SamplingParams(max_tokens=max_tokens, **sampling)
    scheduler.add(Request(request_id, tuple(prompt), params, priority=priority, cache_salt=cache_salt))


def result_of(plan, finished=0.0, stop=()):
    """What a device gives: all the tokens asked for, or one and a stop for the ids in `stop`."""
    sampled = [(chunk.request_id, 1) for chunk in plan.prefill if chunk.is_last]
    sampled += [(entry.request_id, plan.num_steps) for entry in plan.decode]
    rows = [RowResult(i, (7,), stopped=True) if i in stop else RowResult(i, (5,) * n) for i, n in sampled]
    return StepResult(plan.step_id, tuple(rows), StepTiming(finished, finished))


def run(scheduler, stop=()):
    plan = scheduler.schedule()
    outputs = scheduler.update(result_of(plan, stop=stop))
    scheduler.check()
    return plan, outputs


def chunks(plan):
    return [(chunk.request_id, chunk.start, len(chunk.token_ids), chunk.is_last) for chunk in plan.prefill]


def decoded(plan):
    return [entry.request_id for entry in plan.decode]
