"""What a prompt would find if it came now: as it then finds it, and without a trace."""

import copy
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv.control.scheduler_config import SchedulerConfig
from jaxkv.core.errors import RequestError
from jaxkv.core.metrics import MissReason
from jaxkv.core.request import FinishReason, Request, SamplingParams
from tests.support.scheduling import add, make, run


def explain(scheduler, prompt, salt=None):
    return scheduler.explain_prefix(Request("new", tuple(prompt), SamplingParams(max_tokens=1), cache_salt=salt))


def serve(scheduler, request_id, prompt, salt=None):
    add(scheduler, request_id, prompt, max_tokens=4, cache_salt=salt)
    while len(scheduler.waiting) or not all(state.is_decoding for state in scheduler.running):
        run(scheduler)
    state = scheduler.running[0]
    scheduler.finish(request_id, FinishReason.STOP)
    return state


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.booleans(), st.sampled_from([13, 101]))
def test_it_is_what_the_request_finds(seed, share_partial, num_blocks):
    rng = random.Random(seed)
    scheduler = make(SchedulerConfig(share_partial_blocks=share_partial), num_blocks=num_blocks)
    prompts = [[rng.randrange(3) for _ in range(rng.randint(1, 30))] for _ in range(3)]
    for number in range(12):
        old = rng.choice(prompts)
        prompt = old[: rng.randint(0, len(old))] + [rng.randrange(3) for _ in range(rng.randint(1, 8))]
        salt = rng.choice([None, "s"])
        before = copy.deepcopy(vars(scheduler.stats.prefix_cache))
        told = explain(scheduler, prompt, salt)
        assert explain(scheduler, prompt, salt) == told and vars(scheduler.stats.prefix_cache) == before
        state = serve(scheduler, str(number), prompt, salt)
        assert (told.num_tokens, told.num_cached) == (len(prompt), state.num_cached_tokens)
        assert told.missed == state.missed
        assert told.num_cached <= told.parts_at <= len(prompt)
        assert told.num_cached + sum(told.missed.values()) == len(prompt)
        prompts.append(prompt[:30])


@pytest.mark.parametrize(("share_partial", "num_cached"), [(True, 10), (False, 8)])
def test_where_it_parts_from_the_nearest(share_partial, num_cached):
    scheduler = make(SchedulerConfig(share_partial_blocks=share_partial))
    serve(scheduler, "a", range(16))
    told = explain(scheduler, [*range(10), 90, 91, 92])
    assert (told.num_cached, told.parts_at) == (num_cached, 10)
    assert explain(scheduler, range(16)).parts_at == 16


def test_without_a_cache_there_is_nothing_to_tell():
    scheduler = make(SchedulerConfig(enable_prefix_caching=False))
    serve(scheduler, "a", range(16))
    told = explain(scheduler, range(16))
    assert (told.num_cached, told.parts_at, told.missed) == (0, 0, {})


def test_another_salt_and_what_can_never_be_served():
    scheduler = make()
    serve(scheduler, "a", range(8), salt="theirs")
    assert explain(scheduler, [*range(8), 9], salt="mine").missed == {MissReason.SALT: 8, MissReason.FIRST_SEEN: 1}
    with pytest.raises(RequestError):
        explain(scheduler, [])
