"""Schedulers with one mistake each: every one must be caught, or the oracle of the exactness tests proves nothing."""

import dataclasses
import random

import pytest

from jaxkv.control.cascade_cost import ALWAYS
from jaxkv.control.executor import ExecutorLimits
from jaxkv.control.prefix_index import chain_hashes
from jaxkv.control.prefix_sharing import PrefixHit, PrefixSharing
from jaxkv.control.scheduler import Scheduler
from jaxkv.control.scheduler_config import SchedulerConfig
from jaxkv.core.plan import Masking
from jaxkv.core.request import SamplingParams
from tests.support.scheduler_driver import Driver


class BrokenScheduler(Scheduler):
    """Makes the mistake that `mutation` names; none for an empty one."""

    mutation = ""

    def add(self, request, now=0.0):
        super().add(dataclasses.replace(request, cache_salt=None) if self.mutation == "ignore_salt" else request, now)

    def schedule(self, now=0.0):
        if self.mutation == "choose_before_the_mask":
            for state in self.running:
                if state.choice is not None:
                    state.choice.masking = Masking.FIXED
        plan = super().schedule(now)
        if plan is not None and self.mutation == "forget_table_updates":
            updates = [update if update.admission else update._replace(blocks=()) for update in plan.updates]
            plan = dataclasses.replace(plan, updates=tuple(updates))
        if plan is not None and self.mutation == "forget_masks":
            plan = dataclasses.replace(plan, token_masks=())
        if plan is not None and self.mutation == "masks_of_other_rows":
            rows = [mask.row for mask in plan.token_masks]
            turned = zip(plan.token_masks, rows[1:] + rows[:1])
            plan = dataclasses.replace(plan, token_masks=tuple(mask._replace(row=row) for mask, row in turned))
        if plan is not None and self.mutation == "forget_copies":
            plan = dataclasses.replace(plan, block_copies=())
        if plan is not None and self.mutation == "copy_too_little":
            copies = tuple(dataclasses.replace(copy, num_tokens=copy.num_tokens - 1) for copy in plan.block_copies)
            plan = dataclasses.replace(plan, block_copies=tuple(copy for copy in copies if copy.num_tokens))
        if plan is not None and self.mutation == "group_of_too_many_blocks":
            groups = tuple(group._replace(num_blocks=group.num_blocks + 1) for group in plan.prefix_groups)
            plan = dataclasses.replace(plan, prefix_groups=groups)
        if plan is not None and self.mutation == "group_of_other_rows":
            plan = dataclasses.replace(
                plan, decode=plan.decode[1:] + plan.decode[:1] if plan.prefix_groups else plan.decode
            )
        return plan

    def _is_early(self, state):
        return self.mutation != "fork_too_early" and super()._is_early(state)

    def _admissible_hit(self, state, num_kept):
        hit = super()._admissible_hit(state, num_kept)
        if self.mutation == "fork_writes_to_shared_block" and hit is not None and state.parent and hit.source:
            hit = dataclasses.replace(hit, blocks=hit.used_blocks, source=None)
        if self.mutation == "fork_shares_last_token" and hit is not None and state.parent and hit.source:
            hit = dataclasses.replace(hit, num_head_tokens=hit.num_head_tokens + 1)
        if self.mutation == "share_any_block" and self.running and hit == PrefixHit():
            hit = PrefixHit((self.running[0].blocks[0],), self.limits.block_size)
        return hit

    def _release(self, state):
        if self.mutation == "free_twice" and len(state.blocks) > 1:
            self.blocks.free(state.blocks[-1:])
        if self.mutation == "tail_of_too_many_tokens":
            state.num_computed = min(len(state.token_ids), len(state.blocks) * self.limits.block_size)
        super()._release(state)


def hashes_without_parent(parent, blocks):
    return [chain_hashes(parent, [block])[0] for block in blocks]


@pytest.mark.parametrize(
    "mutation",
    [
        "",
        "ignore_salt",
        "share_any_block",
        "free_twice",
        "forget_table_updates",
        "hash_without_parent",
        "forget_copies",
        "copy_too_little",
        "copy_in_same_plan",
        "fork_too_early",
        "fork_writes_to_shared_block",
        "fork_shares_last_token",
        "group_of_too_many_blocks",
        "group_of_other_rows",
        "forget_masks",
        "masks_of_other_rows",
        "choose_before_the_mask",
        "tail_of_too_many_tokens",
    ],
)
def test_oracle_catches_mutants(mutation, monkeypatch):
    limits, config = (
        ExecutorLimits(40, 4, 4, 30, 3, 40, 8, max_prefix_groups=2),
        SchedulerConfig(cascade=ALWAYS, seed=3),
    )

    def broken_driver(limits):
        driver = Driver(limits, config, 2)
        driver.scheduler = BrokenScheduler(limits, config)
        driver.scheduler.mutation = mutation
        return driver

    driver = broken_driver(limits)
    if mutation == "hash_without_parent":
        monkeypatch.setattr("jaxkv.control.request_state.chain_hashes", hashes_without_parent)
    if mutation == "copy_in_same_plan":
        publish = PrefixSharing.publish
        monkeypatch.setattr(
            PrefixSharing, "publish", lambda *args, **given: publish(*args, **given | {"planned": False})
        )

    def run(with_forks):
        rng = random.Random(1)
        for index in range(40):
            prompt = [rng.randrange(2) for _ in range(rng.randint(5, 12))]
            words = ("some",) if index % 5 == 0 else ()
            parent = driver.add(prompt, SamplingParams(max_tokens=12, bad_words=words), cache_salt="ab"[index % 2])
            if with_forks and index % 4 == 0:
                driver.fork(parent, SamplingParams(max_tokens=12))
            if index % 3 == 0:
                driver.submit()
                driver.read()
        driver.drain()

    def converse():
        """With room for unfilled blocks."""
        rng, driver = random.Random(2), broken_driver(dataclasses.replace(limits, num_blocks=200))
        for index in range(40):
            prompt = [rng.randrange(2) for _ in range(rng.randint(5, 12))]
            if index > 2:  # it goes on from what another one says
                _, history = driver.executor.requests[f"r{index - rng.randint(1, 3)}"]
                prompt = [*history[: rng.randint(5, min(24, len(history)))], *rng.choice([(), (4,), (3, 1)])]
            driver.add(prompt, SamplingParams(max_tokens=rng.choice([1, 3, 9])))
            driver.submit()
            if rng.random() < 0.7:
                driver.read()
        driver.drain()

    def run_all():
        run(with_forks=False)
        run(with_forks=True)
        converse()

    if mutation:
        with pytest.raises((AssertionError, KeyError)):
            run_all()
    else:
        run_all()
