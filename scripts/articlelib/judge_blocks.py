"""Rules of the rows that the block manager decides: A12, A14, B7, B12, B14. Pure, each on what one world measured."""

from typing import Any

from articlelib.verdict import Verdict, says, slashed

Values = dict[str, Any]


def a12(values: Values) -> list[Verdict]:
    usable = values["failures"] == 0 and values["largest_after"] == values["pool"]
    left = values["warm_prefix_left"]
    return [
        Verdict(
            "A12",
            "paged memory fragments over time: restart daily",
            "fragments",
            f"{values['failures']} failures, {values['largest_after']:,} of {values['pool']:,} blocks to one request",
            says(not usable),
            f"after {values['allocations']:,} allocations; the slowest tenth took {values['slowest_tenth']:.2f}x the "
            "median. What decays is what nobody asks for: of a warm prefix "
            + ", ".join(f"{share:.0%} is left after {passed} pools" for passed, share in left.items())
            + "; a restart would empty it all",
            (values["failures"], values["largest_after"]),
        )
    ]


def a14_ran(values: Values) -> list[Verdict]:
    told, ran = values["told"], values["ran"]
    return [
        Verdict(
            "A14",
            "the maximum concurrency of the start lines is what really runs at once",
            f"{told}",
            f"{told} "
            + ("do" if ran["told"] else "do not")
            + f", {told + 1} "
            + ("do" if ran["one_more"] else "do not"),
            says(ran["told"] and not ran["one_more"]),
            f"requests of {values['length']:,} tokens, none preempted; of half the length twice as many "
            + ("do too" if ran["half_as_long"] else "do not"),
            (told,),
        )
    ]


def b7(values: Values) -> list[Verdict]:
    survived = values["finished"] == values["requests"] and not values["cut_short"] and not values["refused"]
    return [
        Verdict(
            "B7",
            "a batch limit that is too large makes the service crash",
            "crash",
            f"{values['finished']} of {values['requests']} finished",
            says(not survived),
            f"max_num_seqs {values['max_num_seqs']} over a pool for {values['pool_holds']}: {values['preemptions']} "
            f"preemptions, {values['refused']} refused, {values['cut_short']} cut short",
            (values["finished"], values["requests"]),
        )
    ]


def b12_memory(values: Values) -> list[Verdict]:
    full, window = (
        [curve[length] for length in sorted(curve, key=int)]
        for curve in (values["curves"]["full"], values["curves"]["window"])
    )
    longest = max(map(int, values["curves"]["window"]))
    flat = window[-1] <= 1.1 * window[len(window) // 2]
    return [
        Verdict(
            "B12",
            "with a sliding window memory stays flat however long the text gets",
            "flat beyond 10k tokens",
            f"{window[-1] / 2**20:.0f} MiB at {longest:,} tokens",
            says(flat and window[-1] < full[-1]),
            f"without {full[-1] / 2**20:.0f} MiB; window of {values['window']:,} tokens",
            (window[-1], full[-1]),
        )
    ]


def b12_needle(values: Values) -> list[Verdict]:
    full, window = values["retrieved"]["full"], values["retrieved"]["window"]
    told = f"full {slashed(f'{x:.0%}' for x in full.values())}, window {slashed(f'{x:.0%}' for x in window.values())}"
    mean_full, mean_window = (sum(found.values()) / len(found) for found in (full, window))
    why = f"a number told {slashed(full)} tokens back, window of {values['window']}: {told}"
    if mean_full < 0.5:
        verdict, why = "not measurable here", f"the model does not find it with all of the context either; {why}"
    else:
        verdict = says(mean_window <= 0.2 * mean_full)
    return [
        Verdict(
            "B12",
            "and what is further back is lost",
            "lost",
            f"found {mean_full:.0%} -> {mean_window:.0%}",
            verdict,
            why,
            (mean_full, mean_window),
        )
    ]


def b14(values: Values) -> list[Verdict]:
    shards, replicas = values["shard_bytes"], values["replicas"]
    even = max(shards) == min(shards) and sum(shards) == values["kv_bytes_per_token"]
    turn, by_prefix = replicas["in turn, with prefix cache"], replicas["by prefix, with prefix cache"]
    plain = replicas["in turn, without prefix cache"]
    return [
        Verdict(
            "B14",
            f"tensor parallelism over {values['gpus']} GPUs fills their caches unevenly",
            "uneven",
            f"{slashed(f'{size:,}' for size in shards)} bytes a token",
            says(not even),
            "each GPU has its KV heads of the same blocks: by a shard's plan, as tensor parallelism is not built yet",
            tuple(shards),
        ),
        Verdict(
            "B14",
            "which a prefix cache and load balancing cure (replicas instead of shards)",
            "cured",
            f"busiest / idlest {plain['spread']:.2f} -> {turn['spread']:.2f}",
            says(plain["spread"] > 1.1 and turn["spread"] < 1.1),
            f"requests dealt in turn are even without a cache; sent by prefix they hit more ({turn['hit_rate']:.0%} -> "
            f"{by_prefix['hit_rate']:.0%}) and load the replicas less evenly ({by_prefix['spread']:.2f})",
            (plain["spread"], turn["spread"], by_prefix["spread"]),
        ),
    ]
