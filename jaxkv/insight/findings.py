"""What is worth telling: causes gathered over many requests, each with what to do and what that would bring."""

import dataclasses
from typing import Any

from jaxkv.insight.templates import Field

_MOST_NAMED = 3


@dataclasses.dataclass(frozen=True)
class Gain:
    """Hit rates of the same requests, replayed one at a time, without and with the remedy.

    Attributes:
      before / after: of all of them. own_before / own_after: of those that have the fault.
      steps: each part of the remedy, and the rate of all with it and those before it; the last is `after`.
      requests: replayed, the last ones of the log. block_size / capacity_blocks: of the pool; None: unbounded.
    """

    before: float
    after: float
    own_before: float
    own_after: float
    steps: tuple[tuple[str, float], ...]
    requests: int
    block_size: int
    capacity_blocks: int | None


@dataclasses.dataclass(frozen=True)
class Finding:
    """Attributes:
    cause: value of a Cause, or "preempted", or "unknown" for a parting that block names do not explain.
    tokens_lost: that this cause made requests compute. num_requests: that it cost any, or that have the fault.
    callers: (name, such requests, all its requests), the most frequent first; None stands for no name.
    position: token where these requests part from others; None if there is no one place.
    fields / looks_like: the spans that differ, and what each looks like.
    examples: some texts of each span; only when texts are asked for.
    common_behind: tokens behind the first of them that are the same in all.
    more_blocks: beyond the capacity, that keep nine tenths of these tokens; None if there is no capacity to compare.
    needed_blocks: usable blocks that keep half, nine tenths and all of them.
    """

    cause: str
    tokens_lost: int
    num_requests: int
    callers: tuple[tuple[str | None, int, int], ...]
    remedy: str
    position: int | None = None
    fields: tuple[Field, ...] = ()
    looks_like: tuple[str | None, ...] = ()
    examples: tuple[tuple[str, ...], ...] = ()
    common_behind: int = 0
    num_documents: int = 0
    more_blocks: int | None = None
    needed_blocks: tuple[int, int, int] | None = None
    gain: Gain | None = None

    def as_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "sentence": self.sentence}

    @property
    def sentence(self) -> str:
        told = getattr(self, f"_{self.cause}")()
        return f"{self._who} {told} ({self.tokens_lost:,} tokens computed for it). {self._outcome}"

    @property
    def _who(self) -> str:
        total = sum(of for _, _, of in self.callers)
        share = f"{self.num_requests:,} of {total:,} requests ({100 * self.num_requests / total:.0f} %)"
        names = [repr(name) for name, _, _ in self.callers if name is not None]
        if not names:
            return share
        more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        return f"{share} of {', '.join(names[:_MOST_NAMED])}{more}"

    @property
    def _outcome(self) -> str:
        gain = self.gain
        if gain is None:
            return f"What may help, not replayed: {self.remedy[0].lower()}{self.remedy[1:]}."
        bound = "any number of" if gain.capacity_blocks is None else f"{gain.capacity_blocks:,}"
        replayed = f"{gain.requests:,} requests replayed one at a time, {bound} blocks of {gain.block_size} tokens"
        steps = "".join(f"; {name}: {_percent(rate)}" for name, rate in gain.steps) if len(gain.steps) > 1 else ""
        if gain.after <= gain.before:
            return f"{self.remedy} does not raise the hit rate of {_percent(gain.before)}{steps} ({replayed})."
        own = f"their hit rate from {_percent(gain.own_before)} to {_percent(gain.own_after)}"
        everyone = f"that of all from {_percent(gain.before)} to {_percent(gain.after)}"
        return f"{self.remedy} raises {own}, {everyone}{steps} ({replayed})."

    def _changed_text(self) -> str:
        more = [f"; then {self._span(i)} at about token {f.start:,}" for i, f in enumerate(self.fields) if i]
        common = f"{self.common_behind:,} tokens behind it do not vary"
        return f"part at token {self.position:,}, in {self._span(0)}{''.join(more)}; {common}"

    def _span(self, i: int) -> str:
        field = self.fields[i]
        size = "" if field.min_length == field.max_length else f"{field.min_length:,} to "
        looks = f" that looks like {self.looks_like[i]}" if self.looks_like[i] else ""
        texts = f" such as {', '.join(map(repr, self.examples[i]))}" if self.examples else ""
        return f"a span of {size}{field.max_length:,} tokens with {field.num_values:,} values{looks}{texts}"

    def _reordered(self) -> str:
        return (
            f"part at token {self.position:,} and have the same pieces (documents, tools, examples: {self.num_documents:,} of "
            "them) in another order than others"
        )

    def _token_boundary(self) -> str:
        return "have the text of an earlier request in other tokens from where they part"

    def _salt(self) -> str:
        return "have a prefix that is cached under another cache_salt"

    def _evicted(self) -> str:
        needed = ""
        if self.needed_blocks is not None:
            half, most, everything = self.needed_blocks
            needed = f"; {half:,} blocks keep half of it, {most:,} nine tenths, {everything:,} all"
        more = f": {self.more_blocks:,} more than there are for nine tenths" if self.more_blocks else ""
        return f"ask for a prefix that was overwritten before{needed}{more}"

    def _shorter_than_block(self) -> str:
        return "agree with a cached block in part and could not copy that part"

    def _not_cached(self) -> str:
        return (
            "have a prefix that an earlier request had too, but that was not in the cache: not computed yet, a restart, a "
            "reset, or the cache is off"
        )

    def _preempted(self) -> str:
        return "lost their blocks while running and computed tokens again"

    def _unknown(self) -> str:
        return f"part from all earlier ones within the block that begins at token {self.position:,}"


def _percent(rate: float) -> str:
    return f"{100 * rate:.1f} %"
