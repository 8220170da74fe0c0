"""Evaluates settings side by side in worker processes, by replays of which each is run once."""

import concurrent.futures
import dataclasses
import math
import multiprocessing
from collections.abc import Callable, Sequence

from benchlib.tuning_engines import EnginePlanner
from benchlib.tuning_replays import Job, JobResult, load_parts, mean_rate, run_job
from jaxkv.simulation.goodput import Goal, HighestSpeed, Served
from jaxkv.simulation.traces import Trace
from jaxkv.simulation.tuning import Outcome, Setting

SEARCHED, HELD_OUT = "searched", "held out"


@dataclasses.dataclass(frozen=True)
class Found:
    """Details of an Outcome.

    Attributes:
      reference: the replay at the speed at which settings are compared. replays: all, by speed.
      highest: None where all replays have one speed.
      rate: arrivals a second at speed 1.
    """

    reference: Served
    replays: tuple[Served, ...]
    highest: HighestSpeed | None
    rate: float


@dataclasses.dataclass(frozen=True)
class Look:
    """A setting that was looked at, whether or not it was measured then.

    Attributes:
      to_beat: a goodput. served: None: the setting was refused.
    """

    setting: Setting
    to_beat: float
    served: Served | None


class Evaluator:
    """The `Objective` of `simulation.tuning`: scores are goodputs, details `Found`.

    A look is one replay at the speed that brings the rate to beat. As strains rise with the speed, a setting whose
    strain is at most 1 there beats it, and no other does.

    Attributes:
      reference: the speed at which the latencies of settings are compared, and from which rates are searched.
      looks: every one. num_replays: so far.
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
        self.reference = 1.0 if speed is None else speed
        self.looks: list[Look] = []
        self.num_replays = 0
        self._planner, self._goal, self._on_replays = planner, goal, on_replays
        self._search = speed is None
        self._rates = {name: mean_rate(part) for name, part in parts.items()}
        self._replays: dict[tuple, dict[float, Served]] = {}
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

    def look(self, settings: Sequence[Setting], to_beat: float) -> list[float | None]:
        speed = to_beat / self._rates[SEARCHED] if self._search else self.reference
        results = self._run(settings, SEARCHED, (speed,), search=False)
        served = [None if result is None else result.replays[speed] for result in results]
        self.looks += [Look(setting, to_beat, one) for setting, one in zip(settings, served, strict=True)]
        return [None if one is None else self._seems(one, to_beat) for one in served]

    def measure(self, settings: Sequence[Setting], part: str = SEARCHED) -> list[Outcome | None]:
        results = self._run(settings, part, (self.reference,), search=self._search)
        return [None if result is None else self._outcome(result, part) for result in results]

    def _seems(self, served: Served, to_beat: float) -> float:
        if self._search:
            return math.nextafter(1 / served.strain, math.inf)  # a strain of 1 is good enough
        return served.goodput / to_beat if to_beat else math.inf if served.goodput else 0.0

    def _outcome(self, result: JobResult, part: str) -> Outcome:
        reference, rate = result.replays[self.reference], self._rates[part]
        replays = tuple(served for _, served in sorted(result.replays.items()))
        score = reference.goodput if result.highest is None else result.highest.speed * rate
        return Outcome(score, Found(reference, replays, result.highest, rate))

    def _run(
        self, settings: Sequence[Setting], part: str, speeds: tuple[float, ...], search: bool
    ) -> list[JobResult | None]:
        jobs = [self._job(setting, part, speeds, search) for setting in settings]
        if self._pool is None:
            results = [None if job is None else self._counted(run_job(job)) for job in jobs]
        else:
            futures = [None if job is None else self._pool.submit(run_job, job) for job in jobs]
            for future in concurrent.futures.as_completed(filter(None, futures)):
                self._counted(future.result())
            results = [None if future is None else future.result() for future in futures]
        for setting, result in zip(settings, results, strict=True):
            if result is not None:
                self._replays.setdefault(_key(setting, part), {}).update(result.replays)
        return results

    def _job(self, setting: Setting, part: str, speeds: tuple[float, ...], search: bool) -> Job | None:
        engine = self._planner.engine(setting)
        if engine is None:
            return None
        known = tuple(self._replays.get(_key(setting, part), {}).values())
        start = max([self.reference, *(served.speed for served in known if served.strain <= 1)])
        return Job(engine, self._goal, part, speeds, start if search else None, known)

    def _counted(self, result: JobResult) -> JobResult:
        self.num_replays += result.num_run
        self._on_replays(self.num_replays)
        return result


def _key(setting: Setting, part: str) -> tuple:
    return part, *sorted(setting.items())
