"""Rules of the rows about hit rates and 8-bit formats: A1, A4, A6, A7, B10. Pure, each on what one world measured."""

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
                f"{rouge['summaries']} summaries; {rouge['mean']['float32']:.3f} in float32, "
                f"{rouge['mean']['int8']:.3f} in int8; a loss of 0.01 within a standard error counts",
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
    """The two changes together are judged at the load that suits the claim better; max_num_seqs alone where it makes nobody
    wait, since waiting makes the time until a block is asked for again longer."""
    each = "; ".join(
        f"at {one['load']:.1f} requests/s "
        + ", ".join(f"{name}: {run['hit_rate']:.1%} {run['ttft']:.2f} s" for name, run in one["runs"].items())
        for one in values.values()
    )
    loads = [one["runs"] for one in values.values()]
    gains = [runs["0.90 8"]["hit_rate"] - runs["0.85 16"]["hit_rate"] for runs in loads]
    sooner = [runs["0.85 16"]["ttft"] / runs["0.90 8"]["ttft"] for runs in loads]
    quiet = values["quiet"]["runs"]
    alone = quiet["0.85 8"]["hit_rate"] - quiet["0.85 16"]["hit_rate"]
    return [
        Verdict(
            "A6",
            "utilization 0.85 -> 0.90 with max_num_seqs 16 -> 8: ten points more hits",
            "< 20 -> 30 %",
            f"{max(gains):+.1%}",
            says(max(gains) >= ROUGHLY * 0.1),
            f"utilization and max_num_seqs, hit rate and TTFT {each}",
            (max(gains),),
        ),
        Verdict(
            "A6",
            "and TTFT 900 -> 600 ms",
            "1.5x",
            f"{max(sooner):.2f}x",
            says(reaches(max(sooner), 1.5)),
            "memory alone "
            + slashed(f"{runs['0.85 16']['ttft'] / runs['0.90 16']['ttft']:.2f}" for runs in loads)
            + "x, fewer sequences alone "
            + slashed(f"{runs['0.85 16']['ttft'] / runs['0.85 8']['ttft']:.2f}" for runs in loads)
            + f"x ({slashed(values)}): where 8 rows do not carry the load, the others wait",
            (max(sooner),),
        ),
        Verdict(
            "A6",
            "more sequences at once lower the reuse of blocks",
            "lower",
            f"{-alone:+.1%} with 16 instead of 8",
            says(alone >= 0.01),
            "max_num_seqs alone, at the load that both carry; a point or more counts",
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
            f"computed tokens a request: {short['computed_tokens']:.0f} -> {long['computed_tokens']:.0f}; what is "
            "asked has not become less",
            (sooner, short["computed_tokens"], long["computed_tokens"]),
        ),
    ]
