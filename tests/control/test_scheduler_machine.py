"""A hypothesis state machine drives scheduler, block manager and prefix index; every invariant after every step."""

import random

import hypothesis
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from jaxkv.core.request import FinishReason
from tests.support.scheduler_driver import Driver, add_random, fork_random, random_setup


class EngineMachine(RuleBasedStateMachine):
    """Any order of adds, forks, submits, reads, ends, pins and preemptions. Extending, finishing and evicting are what
    submits and reads do in the small pools of `random_setup`."""

    num_steps = num_forks = num_evictions = 0

    @initialize(rng=st.randoms(use_true_random=False))
    def set_up(self, rng):
        self.rng = rng
        self.driver = Driver(*random_setup(random.Random(rng.getrandbits(32))))

    @rule(seed=st.integers(0, 2**32 - 1))
    def add(self, seed):
        add_random(self.driver, random.Random(seed))

    @precondition(lambda self: self.driver.scheduler.has_requests)
    @rule(seed=st.integers(0, 2**32 - 1))
    def fork(self, seed):
        type(self).num_forks += fork_random(self.driver, random.Random(seed))

    @rule()
    def submit(self):
        self.driver.submit()

    @rule()
    def read(self):
        self.driver.read()

    @rule()
    def submit_and_read(self):
        self.driver.submit()
        self.driver.read()

    @precondition(lambda self: self.driver.scheduler.has_requests)
    @rule(data=st.data())
    def abort(self, data):
        self.driver.end(data.draw(st.sampled_from(self.driver.scheduler.live_ids)), FinishReason.ABORT)

    @precondition(lambda self: self.driver.scheduler.running)
    @rule(data=st.data())
    def preempt(self, data):
        self.driver.preempt(data.draw(st.sampled_from(self.driver.scheduler.running)).request_id)

    @rule(preempt_running=st.booleans())
    def reset_prefix_cache(self, preempt_running):
        self.driver.reset_prefix_cache(preempt_running)

    @rule(salt=st.sampled_from([None, "a"]))
    def turn_pin(self, salt):
        self.driver.turn_pin(salt)

    @invariant()
    def count(self):
        type(self).num_steps += 1

    def teardown(self):
        if hasattr(self, "driver"):
            self.driver.drain()
            type(self).num_evictions += self.driver.scheduler.blocks.num_evictions


def test_any_order_of_operations_is_exact():
    EngineMachine.num_steps = EngineMachine.num_forks = EngineMachine.num_evictions = 0
    run_state_machine_as_test(
        EngineMachine,
        settings=hypothesis.settings(
            max_examples=300,
            stateful_step_count=60,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(hypothesis.HealthCheck),
        ),
    )
    assert EngineMachine.num_steps >= 10_000  # rules that ran, each with all invariants checked after it
    # Hypothesis draws constants out of whatever modules are loaded, so these vary: about 360 to 800, and thousands.
    assert EngineMachine.num_forks >= 150 and EngineMachine.num_evictions >= 500
