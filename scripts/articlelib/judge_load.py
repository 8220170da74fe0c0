"""Rules of the rows about who waits and what is shared: A9, A10, A11, A13. Pure, each on what one world measured."""

from typing import Any

from articlelib.verdict import Verdict, says, slashed

Values = dict[str, Any]


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
            f"by interval {slashed(f'{rate:.0%}' for rate in by_interval)}: there the tail stays hidden as long as "
            "the mix stays the same",
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
            f"TTFT {front['ttft'] * 1e3:.0f} instead of {behind['ttft'] * 1e3:.0f} ms; diagnosis finds the place: "
            f"token {found} (planted: {planted}), and computes {values['computed_before']:.0%} -> "
            f"{values['computed_after']:.0%} if it were moved",
            (front["hit_rate"], behind["hit_rate"]),
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
            f"mean TTFT of the first requests, longest {cold['ttft_max'] * 1e3:.0f} -> "
            f"{warm['ttft_max'] * 1e3:.0f} ms; {cold['cached_tokens']:,} -> {warm['cached_tokens']:,} tokens cached; a tenth counts",
            (gain,),
        )
    ]
