"""Evaluates settings side by side in worker processes."""

import concurrent.futures
import multiprocessing
from collections.abc import Callable, Sequence

from benchlib.tuning_engines import EnginePlanner
from benchlib.tuning_replays import Job, JobResult, load_parts, run_job
from jaxkv.simulation.goodput import Goal
from jaxkv.simulation.traces import Trace
from jaxkv.simulation.tuning import FULL, Outcome, Setting

SEARCHED, HELD_OUT = "searched", "held out"


class Evaluator:
    """`Evaluate` for `simulation.tuning`: outcomes whose details are JobResults.

    Attributes:
      start: where rates are searched from; also the speed at which latencies of settings are compared.
    """

    def __init__(
        self,
        planner: EnginePlanner,
        parts: dict[str, Trace],
        goal: Goal,
        *,
        speed: float | None,
        processes: int,
        on_replays: Callable[[int], None] = lambda count: None,
    ):
        """
        Args:
          parts: of the trace, by SEARCHED and HELD_OUT.
          speed: of all replays; None searches the highest that meets the goal.
          processes: 1: in this one.
          on_replays: called with the number of replays so far.
        """
        self.start = 1.0 if speed is None else speed
        self._planner, self._goal = planner, goal
        self._search = speed is None
        self._on_replays, self._num_replays = on_replays, 0
        self._pool = None
        if processes > 1:
            # Not forked: JAX has threads. Each imports the main program again, which must bring no jax.
            spawn = multiprocessing.get_context("spawn")
            self._pool = concurrent.futures.ProcessPoolExecutor(processes, spawn, load_parts, (parts,))
        else:
            load_parts(parts)

    def __enter__(self) -> "Evaluator":
        return self

    def __exit__(self, *exception: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def __call__(self, settings: Sequence[Setting], fidelity: float) -> list[Outcome | None]:
        return self.outcomes(settings, SEARCHED, fidelity)

    def outcomes(self, settings: Sequence[Setting], part: str, share: float = FULL) -> list[Outcome | None]:
        engines = [self._planner.engine(setting) for setting in settings]
        jobs = [
            Job(engine, self._goal, part, share, self.start, self._search) for engine in engines if engine is not None
        ]
        results = iter(self._run(jobs))
        return [None if engine is None else self._outcome(next(results)) for engine in engines]

    def _run(self, jobs: list[Job]) -> list[JobResult]:
        if self._pool is None:
            return [self._counted(run_job(job)) for job in jobs]
        futures = [self._pool.submit(run_job, job) for job in jobs]
        for future in concurrent.futures.as_completed(futures):
            self._counted(future.result())
        return [future.result() for future in futures]

    def _counted(self, result: JobResult) -> JobResult:
        self._num_replays += len(result.replays)
        self._on_replays(self._num_replays)
        return result

    @staticmethod
    def _outcome(result: JobResult) -> Outcome:
        return Outcome(result.score, result)
