"""Who goes first, who is preempted, and that nobody starves."""

from jaxkv.control.scheduler_config import SchedulerConfig
from jaxkv.core.clock import SimulatedClock
from jaxkv.core.request import FinishReason
from jaxkv.simulation.cost_model import ConstantCostModel
from jaxkv.simulation.sim_executor import SimExecutor
from tests.support.scheduling import add, chunks, decoded, make, result_of, run


def test_first_come_first_served_even_if_a_later_one_would_fit():
    scheduler = make(num_blocks=11, max_model_len=36, max_num_batched_tokens=36)
    add(scheduler, "a", 15)
    add(scheduler, "big", 32, max_tokens=2)
    add(scheduler, "small", 2)
    plan, _ = run(scheduler)
    assert chunks(plan) == [("a", 0, 15, True)]
    scheduler.finish("a", FinishReason.ABORT)
    plan, _ = run(scheduler)
    assert chunks(plan)[0] == ("big", 0, 32, True)


def test_priority_policy_serves_lower_numbers_first():
    scheduler = make(SchedulerConfig(policy="priority"), max_num_seqs=1)
    for name, priority in (("a", 5), ("b", 1), ("c", 5), ("d", -1)):
        add(scheduler, name, 3, priority=priority)
    order = []
    while scheduler.has_requests:
        plan, _ = run(scheduler, stop="abcd")
        order += [chunk.request_id for chunk in plan.prefill]
    assert order == ["d", "b", "a", "c"]
    fcfs = make(max_num_seqs=1)
    for name, priority in (("a", 5), ("b", 1)):
        add(fcfs, name, 3, priority=priority)
    assert [run(fcfs, stop="ab")[0].prefill[0].request_id for _ in "ab"] == ["a", "b"]


def grow_until_preemption(scheduler):
    for _ in range(50):
        before = {state.request_id for state in scheduler.running}
        plan, _ = run(scheduler)
        if scheduler.stats.preemptions:
            return plan, before - {state.request_id for state in scheduler.running}
    raise AssertionError("nobody was preempted")


def test_preemption_takes_the_cheapest_newer_request_and_continues_it_later():
    scheduler = make(SchedulerConfig(decode_steps=1), num_blocks=12, max_model_len=45, max_num_batched_tokens=45)
    add(scheduler, "old", 6, max_tokens=30)
    add(scheduler, "long", 12, max_tokens=30)
    add(scheduler, "short", 2, max_tokens=30, min_tokens=20)
    plan, victims = grow_until_preemption(scheduler)
    assert victims == {"short"} and decoded(plan) == ["old", "long"]
    state = scheduler.waiting.head()
    generated = state.num_generated_tokens
    assert generated > 1 and state.num_preemptions == scheduler.stats.preemptions == 1
    scheduler.finish("old", FinishReason.ABORT)
    plan, outputs = run(scheduler)
    (chunk,) = plan.prefill
    assert chunk.request_id == "short" and chunk.start + len(chunk.token_ids) == 2 + generated and chunk.is_last
    admission = next(update.admission for update in plan.updates if update.admission)
    assert (admission.max_new_tokens, admission.min_new_tokens) == (30 - generated, 20 - generated)
    assert next(output for output in outputs if output.request_id == "short").num_cached_tokens == 0


def test_the_cheapest_is_spared_after_two_preemptions_until_the_others_have_had_theirs():
    for counts, victim in (((0, 1), "short"), ((0, 2), "long"), ((2, 2), "short"), ((3, 4), "long")):
        # Ten blocks: it is "old" that needs the eleventh.
        scheduler = make(SchedulerConfig(decode_steps=1), num_blocks=11, max_num_batched_tokens=45)
        for name, length in (("old", 6), ("long", 12), ("short", 2)):
            add(scheduler, name, length, max_tokens=25)
        run(scheduler)
        for state, count in zip(scheduler.running[1:], counts, strict=True):
            state.num_preemptions = count
        assert grow_until_preemption(scheduler)[1] == {victim}


def test_preemptions_are_fewer_than_blocks_that_decoding_fills():
    scheduler = make(num_blocks=20, max_model_len=60, max_num_seqs=4)
    for number in range(30):
        add(scheduler, str(number), 1 + number % 20, max_tokens=40, ignore_eos=True)
    executor = SimExecutor(scheduler.limits, ConstantCostModel(), SimulatedClock())
    while scheduler.has_requests:
        scheduler.update(executor.submit(scheduler.schedule()).result())
        scheduler.check()
    filled = scheduler.stats.generated_tokens // scheduler.limits.block_size
    assert scheduler.stats.generated_tokens == 30 * 40 and 0 < scheduler.stats.preemptions < filled


def test_oldest_request_is_never_preempted_and_everyone_finishes():
    scheduler = make(num_blocks=12, max_model_len=45)
    for number in range(6):
        add(scheduler, str(number), 4 + number, max_tokens=35)
    executor = SimExecutor(scheduler.limits, ConstantCostModel(), SimulatedClock())
    finished = []
    for _ in range(500):
        oldest = min([*scheduler.running, *scheduler.waiting], key=lambda state: state.rank)
        before = oldest.num_preemptions
        outputs = scheduler.update(executor.submit(scheduler.schedule()).result())
        assert oldest.num_preemptions == before
        finished += [output.request_id for output in outputs if output.finish_reason]
        scheduler.check()
        if not scheduler.has_requests:
            break
    assert finished[0] == "0" and sorted(finished) == list("012345")
    assert 0 < scheduler.stats.preemptions < 20


def test_preempted_request_waits_for_its_tokens_in_flight():
    scheduler = make()
    add(scheduler, "a", 6)
    run(scheduler)
    plan = scheduler.schedule()
    scheduler.preempt("a")
    assert scheduler.schedule() is None  # what to prefill is not known yet
    (output,) = scheduler.update(result_of(plan))
    assert len(output.token_ids) == 8
    plan, _ = run(scheduler)
    assert chunks(plan) == [("a", 6, 9, True)]  # the prompt's K/V is found again; 6 + 1 + 8 known tokens


def test_a_preempted_request_can_finish_with_a_token_in_flight():
    scheduler = make()
    add(scheduler, "a", 6)
    run(scheduler)
    plan = scheduler.schedule()
    scheduler.preempt("a")
    (output,) = scheduler.update(result_of(plan, stop=["a"]))
    assert output.finish_reason is FinishReason.STOP and not scheduler.has_requests
    scheduler.check()
