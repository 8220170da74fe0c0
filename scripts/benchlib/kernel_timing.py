"""Times of kernels on the device, without the host's part.

A call of a few microseconds costs more to enqueue than to run. So one executable holds many calls in a loop, and each takes
the output of the one before as its input: nothing can be left out, moved ahead of the loop or run side by side. The
inputs that are large go round among several sets where they would fit into the L2 cache.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

# Seconds that one loop should take: long beside what starting it costs, some 0.1 ms.
LOOP_SECONDS = 0.03
MOST_CALLS, FEWEST_CALLS = 512, 2
# Calls in the body of the loop. XLA makes a CUDA graph of five launches and more (found in its thunks, compiled for an H200
# by JAX 0.11.2), so that a turn of the loop is one launch; equal kernels are compiled once, whatever their number.
CALLS_A_TURN = 8
# Bytes that no L2 cache keeps: an H200 has 50 MB of it. So many sets at most: each is a call more to compile.
COLD_BYTES, MOST_SETS = 200_000_000, 24


@dataclasses.dataclass(frozen=True)
class Contender:
    """Something to time.

    Attributes:
      run: does `calls` calls and returns the seconds that they took, the device having finished.
    """

    name: str
    run: Callable[[], float]
    calls: int


def num_calls(expected_seconds: float, num_sets: int, loop_seconds: float = LOOP_SECONDS) -> int:
    """How often to call: whole turns of the loop, if there is more than one."""
    wanted = min(MOST_CALLS, max(FEWEST_CALLS, round(loop_seconds / expected_seconds)))
    a_turn = _calls_a_turn(wanted, num_sets)
    return -(-wanted // a_turn) * a_turn


def _calls_a_turn(calls: int, num_sets: int) -> int:
    """A multiple of the number of input sets."""
    return num_sets * max(1, min(CALLS_A_TURN, calls) // num_sets)


def num_sets(num_bytes: int, cold_bytes: int = COLD_BYTES) -> int:
    """Input sets of `num_bytes` each that together stay out of the L2 cache."""
    return min(MOST_SETS, max(1, -(-cold_bytes // num_bytes)))


def chained(
    call: Callable[..., Any],
    first: Any,
    sets: Sequence[tuple],
    calls: int,
    *,
    in_place: bool = False,
    keep: Callable[[Any], Any] | None = None,
) -> Callable[[], float]:
    """Compile `calls` (of num_calls) calls x = call(x, *set), the sets in turn, each on what the one before returned.

    Args:
      call: returns what it takes first, of the same shapes and dtypes.
      first: the first x.
      in_place: x is donated, as kv_write has it. Then a run goes on where the last one ended.
      keep: is given what the last call of each run returned.
    """

    a_turn = _calls_a_turn(calls, len(sets))

    def loop(x, sets):
        def turn(_, x):
            for i in range(a_turn):
                x = call(x, *sets[i % len(sets)])
            return x

        return jax.lax.fori_loop(0, calls // a_turn, turn, x)

    sets = tuple(sets)
    compiled = jax.jit(loop, donate_argnums=(0,) if in_place else ()).lower(first, sets).compile()
    state = [first]

    def run() -> float:
        begin = time.perf_counter()
        out = jax.block_until_ready(compiled(state[0], sets))
        seconds = time.perf_counter() - begin
        if in_place:
            state[0] = out
        if keep is not None:
            keep(out)
        return seconds

    return run


def interleaved(contenders: Sequence[Contender], rounds: int) -> dict[str, list[float]]:
    """Seconds a call of each contender in each round; in turns, so that a slow moment meets all. The first runs warm up."""
    for contender in contenders:
        contender.run()
    seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for _ in range(rounds):
        for contender in contenders:
            seconds[contender.name].append(contender.run() / contender.calls)
    return seconds


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """What the device reaches at its simplest work, each the median of a few runs.

    Attributes:
      copy: bytes a second, read and written ones counted, of numbers read, changed and written.
      read: bytes a second of numbers that are only read and added up.
      matmul: FLOP/s of a square bfloat16 product.
    """

    copy: float
    read: float
    matmul: float


def measure_ceilings(num_bytes: int, matmul_size: int, rounds: int = 5) -> Ceilings:
    """Of arrays of `num_bytes` and products of `matmul_size` squared matrices."""
    jnp = jax.numpy
    numbers = jax.random.bits(jax.random.key(0), (num_bytes // 4,), "uint32").view("int32")
    matrix = jax.random.normal(jax.random.key(1), (matmul_size, matmul_size), "bfloat16")
    weights = matrix * matmul_size**-0.5  # keeps the size of what is multiplied
    calls = CALLS_A_TURN
    contenders = (
        Contender("copy", chained(lambda x: x + 1, jnp.copy(numbers), [()], calls, in_place=True), calls),
        Contender("read", chained(lambda x, y: jnp.sum(y ^ x), jnp.int32(1), [(numbers,)], calls), calls),
        Contender("matmul", chained(lambda x, w: x @ w, matrix, [(weights,)], calls), calls),
    )
    seconds = {name: statistics.median(samples) for name, samples in interleaved(contenders, rounds).items()}
    return Ceilings(
        copy=2 * numbers.nbytes / seconds["copy"],
        read=numbers.nbytes / seconds["read"],
        matmul=2 * matmul_size**3 / seconds["matmul"],
    )
