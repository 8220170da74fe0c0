"""Rules of the rows about hit rates, blocks and quality: A1, A4, A6, A7, A9 to A14, B7, B10, B12, B14. Pure, each on what one
world measured.
"""

from typing import Any

from articlelib.verdict import ROUGHLY, Verdict, reaches, says, slashed

Values = dict[str, Any]


def a1(values: Values) -> list[Verdict]:
    sizes, rates = values["block_sizes"], values["hit_rates"]
    found = []
    for name, words in (("whole", "whole blocks shared"), ("to_the_token", "shared to the token")):
        rate = dict(zip(sizes, rates[name], strict=True))
        drop, visibly = rate[16] - rate[32], rate[16] - rate[128]
        told = slashed(f"{value:.1%}" for value in rates[name])
        found += [
            Verdict(
                "A1",
                f"blocks of 32 instead of 16 cost 5 points of hit rate ({words})",
                "60 -> 55 %",
                f"{rate[16]:.1%} -> {rate[32]:.1%}",
                says(drop >= ROUGHLY * 0.05),
                f"at {slashed(sizes)}: {told}",
                (drop,),
            ),
            Verdict(
                "A1",
                f"blocks of 128 lower the hit rate visibly ({words})",
                "visibly",
                f"{-visibly:+.1%}",
                says(visibly >= 0.02),
                "two points or more count as visible",
                (visibly,),
            ),
        ]
    entries = dict(zip(sizes, values["table_entries"], strict=True))
    gain = rates["whole"][0] - rates["whole"][sizes.index(16)]
    found.append(
        Verdict(
            "A1",
            "blocks below 16 only make tables longer",
            "no gain",
            f"{gain:+.1%}",
            says(gain < 0.01),
            f"hit rate with blocks of 8 instead of 16; {entries[8]} entries a row instead of {entries[16]}",
            (gain,),
        )
    )
    return found


def a4_hit_rate(values: Values) -> list[Verdict]:
    rates = values["hit_rates"]
    return [
        Verdict(
            "A4",
            f"8-bit KV raises the hit rate by 20 points ({name})",
            "60 -> 80 %",
            f"{rates['float16']:.0%} -> {rates[name]:.0%}",
            says(rates[name] - rates["float16"] >= ROUGHLY * 0.2),
            "a larger pool at the same load",
            (rates[name] - rates["float16"],),
        )
        for name in ("int8", "fp8_e4m3")
    ]


def a4_quality(values: Values) -> list[Verdict]:
    return [
        Verdict(
            "A4",
            f"no visible change of quality ({name})",
            "none",
            f"{min(one['agreement'] for one in tasks.values()):.1%} of best tokens kept",
            says(all(one["agreement"] >= 0.99 and abs(one["perplexity_change"]) < 0.005 for one in tasks.values())),
            "at least 99 % of best tokens and half a percent of perplexity, on answers of "
            + ", ".join(f"{kind} (KL {one['kl']:.1e})" for kind, one in tasks.items()),
            tuple(one["agreement"] for one in tasks.values()),
        )
        for name, tasks in values["tasks"].items()
    ]


def b10_memory(values: Values) -> list[Verdict]:
    stored = values["A4"]["bytes_per_token"]
    share = stored["int8"] / stored["float16"]
    return [
        Verdict(
            "B10",
            "int8 KV takes half the memory",
            "0.50x",
            f"{share:.3f}x",
            says(share <= 0.55),
            f"{stored['int8']:,} instead of {stored['float16']:,} bytes a token, scales included",
            (share,),
        )
    ]


def b10_quality(values: Values) -> list[Verdict]:
    tasks = values["tasks"]["int8"]
    others = max(one["kl"] for kind, one in tasks.items() if kind != "maths")
    found = []
    if rouge := values.get("rouge_l"):
        loss, error = rouge["int8"]["loss"], rouge["int8"]["error"] or 0.0
        within = loss - error <= 0.01
        found.append(
            Verdict(
                "B10",
                "ROUGE-L of summaries falls by 0.01 (0.42 to 0.41)",
                "0.01",
                f"{loss:.3f} +- {error:.3f}",
                says(within),
                f"{rouge['summaries']} summaries; {rouge['mean']['float32']:.3f} in float32, {rouge['mean']['int8']:.3f} "
                "in int8; a loss of 0.01 within a standard error counts",
                (loss, error),
            )
        )
    found.append(
        Verdict(
            "B10",
            "maths needs care",
            "more loss than elsewhere",
            f"{tasks['maths']['kl'] / others:.2f}x",
            says(tasks["maths"]["kl"] > others),
            "KL divergence on the answers, int8: "
            + ", ".join(f"{kind} {one['kl']:.1e}" for kind, one in tasks.items()),
            (tasks["maths"]["kl"], others),
        )
    )
    return found


def a6(values: Values) -> list[Verdict]:
    runs = values["runs"]
    before, both, memory, rows = (runs[name] for name in ("0.85 16", "0.90 8", "0.90 16", "0.85 8"))
    each = "; ".join(f"{name}: {one['hit_rate']:.1%}, {one['ttft']:.2f} s" for name, one in runs.items())
    gain, sooner = both["hit_rate"] - before["hit_rate"], before["ttft"] / both["ttft"]
    alone = rows["hit_rate"] - before["hit_rate"]
    return [
        Verdict(
            "A6",
            "utilization 0.85 -> 0.90 with max_num_seqs 16 -> 8: ten points more hits",
            "< 20 -> 30 %",
            f"{before['hit_rate']:.1%} -> {both['hit_rate']:.1%}",
            says(gain >= ROUGHLY * 0.1),
            f"utilization and max_num_seqs, hit rate and TTFT at {values['load']:.1f} requests/s: {each}",
            (gain,),
        ),
        Verdict(
            "A6",
            "and TTFT 900 -> 600 ms",
            "1.5x",
            f"{sooner:.2f}x ({before['ttft']:.2f} -> {both['ttft']:.2f} s)",
            says(reaches(sooner, 1.5)),
            f"memory alone {before['ttft'] / memory['ttft']:.2f}x, fewer sequences alone "
            f"{before['ttft'] / rows['ttft']:.2f}x: the others wait",
            (sooner,),
        ),
        Verdict(
            "A6",
            "more sequences at once lower the reuse of blocks",
            "lower",
            f"{-alone:+.1%} with 16 instead of 8",
            says(alone >= 0.01),
            "max_num_seqs alone; a point or more counts",
            (alone,),
        ),
    ]


def a7(values: Values) -> list[Verdict]:
    lengths = sorted(values["runs"], key=int)
    short, long = (values["runs"][length] for length in lengths)
    sooner = short["ttft"] / long["ttft"]
    return [
        Verdict(
            "A7",
            f"a system prompt of {lengths[1]} tokens instead of {lengths[0]}: more than 60 % hits",
            "> 60 %",
            f"{short['hit_rate']:.0%} -> {long['hit_rate']:.0%}",
            says(long["hit_rate"] > 0.6),
            f"the denominator grows: prompts of {short['prompt_tokens']:.0f} -> {long['prompt_tokens']:.0f} tokens",
            (long["hit_rate"],),
        ),
        Verdict(
            "A7",
            "and TTFT falls to half (600 -> below 300 ms)",
            "2x",
            f"{sooner:.2f}x ({short['ttft'] * 1e3:.0f} -> {long['ttft'] * 1e3:.0f} ms)",
            says(reaches(sooner, 2)),
            f"computed tokens a request: {short['computed_tokens']:.0f} -> {long['computed_tokens']:.0f}; what is asked "
            "has not become less",
            (sooner, short["computed_tokens"], long["computed_tokens"]),
        ),
    ]


def a9(values: Values) -> list[Verdict]:
    whole, callers = values["all"], values["caller"]
    worst = min(callers, key=lambda name: callers[name]["hit_rate"])
    bad = callers[worst]
    slow = bad["ttft_p50"] / whole["ttft_p50"]
    seen = max(one["hit_rate"] for one in callers.values()) - bad["hit_rate"] >= 0.5
    lengths = values["prompt length"]
    by_interval = [one["hit_rate"] for one in values["interval"].values()]
    return [
        Verdict(
            "A9",
            "a good mean hit rate hides a slow tail of misses",
            "hidden",
            f"mean {whole['hit_rate']:.0%}, {worst}: {bad['hit_rate']:.0%} and {slow:.1f}x the TTFT",
            says(whole["hit_rate"] >= 0.7 and bad["hit_rate"] <= 0.1 and slow >= 3),
            f"mean TTFT {whole['ttft_mean']:.2f} s, P99 {whole['ttft_p99']:.2f} s; the worst caller's median "
            f"{bad['ttft_p50']:.2f} s against {whole['ttft_p50']:.2f} s of all",
            (whole["hit_rate"], bad["hit_rate"], slow),
        ),
        Verdict(
            "A9",
            "buckets by caller and prompt length show it",
            "seen",
            ", ".join(f"{name} {one['hit_rate']:.0%}" for name, one in (callers | lengths).items()),
            says(seen and max(one["hit_rate"] for one in lengths.values()) - bad["hit_rate"] >= 0.5),
            f"by interval {slashed(f'{rate:.0%}' for rate in by_interval)}: there the tail stays hidden as long as the mix "
            "stays the same",
            (bad["hit_rate"],),
        ),
    ]


def a10(values: Values) -> list[Verdict]:
    runs = {int(name): one for name, one in values["runs"].items()}
    best = min(runs, key=lambda rows: runs[rows]["ttft"])
    slow = {rows: one for rows, one in runs.items() if one["ttft"] >= 2 * runs[best]["ttft"]}
    queued = [one["queue"] / one["ttft"] for one in slow.values()]
    most = max(runs)
    smaller = min(one["ttft"] for rows, one in runs.items() if rows < most)
    told = slashed(f"{one['ttft']:.2f}" for one in runs.values())
    return [
        Verdict(
            "A10",
            "a high hit rate with a TTFT that stays long comes from queueing",
            "queueing",
            f"{min(queued):.0%} of TTFT at least" if queued else "no setting is slow",
            says(bool(queued) and min(queued) > 0.5),
            f"hit rate {runs[best]['hit_rate']:.0%} throughout; TTFT at max_num_seqs {slashed(runs)}: {told} s",
            tuple(queued),
        ),
        Verdict(
            "A10",
            "because max_num_seqs is too high",
            "too high",
            f"best at {best}",
            says(runs[most]["ttft"] > 1.1 * smaller),
            f"{most}: {runs[most]['ttft']:.2f} s, the best of those below {smaller:.2f} s; too few rows make the queue",
            (runs[most]["ttft"], smaller),
        ),
    ]


def a11(values: Values) -> list[Verdict]:
    front, behind = values["runs"]["in front"], values["runs"]["behind"]
    found, planted = values["found_at"], values["planted_at"]
    return [
        Verdict(
            "A11",
            "what changes at the front of a prompt destroys sharing",
            "destroys",
            f"{front['hit_rate']:.0%} instead of {behind['hit_rate']:.0%}",
            says(front["hit_rate"] <= 0.2 * behind["hit_rate"]),
            f"TTFT {front['ttft'] * 1e3:.0f} instead of {behind['ttft'] * 1e3:.0f} ms; diagnosis finds the place: token "
            f"{found} (planted: {planted}), and computes {values['computed_before']:.0%} -> "
            f"{values['computed_after']:.0%} if it were moved",
            (front["hit_rate"], behind["hit_rate"]),
        )
    ]


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


def a13(values: Values) -> list[Verdict]:
    cold, warm = values["cold"], values["warm"]
    gain = cold["ttft"] / warm["ttft"]
    return [
        Verdict(
            "A13",
            "system prompts sent once after a restart make the first requests faster",
            "faster",
            f"{gain:.2f}x ({cold['ttft'] * 1e3:.0f} -> {warm['ttft'] * 1e3:.0f} ms)",
            says(gain >= 1.1),
            f"mean TTFT of the first requests, longest {cold['ttft_max'] * 1e3:.0f} -> {warm['ttft_max'] * 1e3:.0f} ms; "
            f"{cold['cached_tokens']:,} -> {warm['cached_tokens']:,} tokens cached; a tenth counts",
            (gain,),
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
            "each GPU has its KV heads of the same blocks: by the plan of a shard, as tensor parallelism is not built yet",
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
