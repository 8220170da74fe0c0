"""The eviction benchmark as a user runs it."""

import json
import os
import pathlib
import subprocess
import sys

PROGRAM = pathlib.Path(__file__).parents[2] / "scripts" / "bench_eviction.py"


def run(*arguments):
    env = {**os.environ, "PYTHONPATH": str(PROGRAM.parents[1])}
    return subprocess.run(
        [sys.executable, str(PROGRAM), *arguments], capture_output=True, text=True, timeout=300, env=env
    )


def test_hit_rates_lie_between_nothing_and_the_optimum(tmp_path):
    trace = tmp_path / "trace.jsonl"
    row = {"input_length": 1536, "output_length": 1}
    rows = [{**row, "timestamp": 1000 * i, "hash_ids": [0, 1 + i % 3, 9 + i]} for i in range(30)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = run(f"--trace={trace}", "--capacities=4,6", "--policies=lfu", "--lookaheads=0,3", "--json_only")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    assert document["program"] == "bench_eviction" and document["ok"]
    found = {(r["engine"], r["lookahead"], r["capacity_blocks"]): r["value"] for r in document["results"]}
    runs = ("lru", 0), ("opt", 0), ("lru", 3), ("lfu", 0), ("lfu", 3)
    assert set(found) == {(*run, capacity) for run in runs for capacity in (4, 6)}
    # Two of three blocks of each prompt were seen before; six blocks hold them all and the request's own.
    assert found["opt", 0, 6] == 2 / 3 and found["lru", 3, 6] == 2 / 3
    assert all(0 < rate <= found["opt", 0, capacity] for (_, _, capacity), rate in found.items())


def test_mistakes_are_named():
    for argument, message in (
        ("--capacities=many", "capacities is 'many'"),
        ("--policies=clock", "policies has clock"),
        ("--trace=/no/such/file", "/no/such/file"),
    ):
        done = run(argument)
        assert done.returncode == 2 and message in done.stderr
