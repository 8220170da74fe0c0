"""Made-up traffic with faults whose place is known: what the diagnosis must find, and callers where there is nothing to
find. Texts are nonsense words, so that no pattern helps; only one caller's fault looks like anything.

Served as the log says: one request at a time through the real block manager, in a pool that is too small for one caller.
"""

import dataclasses
import itertools
import random
import re
from collections.abc import Callable, Iterator

from jaxkv.control.prefix_index import token_bytes
from jaxkv.core.request_record import RequestRecord, salt_name
from jaxkv.insight.causes import Cause
from jaxkv.insight.findings import Finding
from jaxkv.insight.packing import unpacked
from jaxkv.insight.prompt_log import LoggedRequest, token_log
from jaxkv.insight.prompt_replay import Pool, replay_prompts

BLOCK_SIZE = 16
POOL = Pool(capacity_blocks=700, share_partial=False)
NUM_ROUNDS = 60


class Words:
    """A tokenizer of made-up words: one token a word with the space before it, else one a byte."""

    def __init__(self, rng: random.Random):
        syllables = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]
        self.words = sorted({"".join(rng.choices(syllables, k=rng.randint(2, 3))) for _ in range(3000)})
        self._bytes = [bytes([value]) for value in range(256)] + [f" {word}".encode() for word in self.words]
        self._ids = {data: token for token, data in enumerate(self._bytes)}

    def token_bytes(self, token: int) -> bytes:
        return self._bytes[token]

    def encode(self, text: str) -> list[int]:
        pieces = [piece.encode() for piece in re.findall(r" \w+|.", text, re.DOTALL)]
        return [token for piece in pieces for token in self._whole_or_bytes(piece)]

    def _whole_or_bytes(self, piece: bytes) -> list[int]:
        return [self._ids[piece]] if piece in self._ids else list(piece)


@dataclasses.dataclass(frozen=True)
class Planted:
    """A fault: its cause, the caller, where its requests part (None: at several places), the lengths that the span has,
    what it looks like, and whether a remedy must gain something."""

    cause: str
    caller: str
    position: int | None = None
    lengths: tuple[int, int] | None = None
    looks_like: str | None = None
    gains: bool = True

    def problems(self, findings: list[Finding]) -> list[str]:
        """What the findings lack or have wrong; none if they have found it."""
        found = [f for f in findings if f.cause == self.cause and self.caller in {name for name, _, _ in f.callers}]
        if not found:
            return [f"{self.cause} of {self.caller} was not found"]
        finding, problems = found[0], []
        if self.position is not None and finding.position != self.position:
            problems.append(f"{self.caller} parts at token {self.position}, but {finding.position} was found")
        if self.lengths is not None:
            spans = [(field.min_length, field.max_length) for field in finding.fields]
            if spans != [self.lengths]:
                problems.append(f"{self.caller} has one span of {self.lengths} tokens, but {spans} were found")
            if finding.looks_like != (self.looks_like,):
                problems.append(f"the span of {self.caller} looks like {self.looks_like}, not {finding.looks_like}")
        if self.gains and not (finding.gain and finding.gain.after > finding.gain.before):
            problems.append(f"mending {self.cause} of {self.caller} gains nothing: {finding.gain}")
        return problems


@dataclasses.dataclass(frozen=True)
class Example:
    """The traffic as a request log, what is wrong with it, and the callers that do nothing wrong."""

    records: list[RequestRecord]
    planted: tuple[Planted, ...]
    clean_callers: tuple[str, ...]
    tokenizer: Words


def make_example(num_rounds: int = NUM_ROUNDS, seed: int = 0) -> Example:
    """In each round every caller sends one request."""
    rng = random.Random(seed)
    words = Words(rng)

    def text(count: int) -> str:
        return "".join(f" {rng.choice(words.words)}" for _ in range(count))

    callers: dict[str, Iterator[dict]] = {}
    planted = []

    def plant(caller: str, make: Callable[..., Iterator[dict]], cause: str, **rest) -> None:
        callers[caller] = make(rng, words, text)
        planted.append(Planted(cause, caller, **rest))

    plant("clock", _clock, Cause.CHANGED_TEXT.value, position=121, lengths=(8, 8), looks_like="a timestamp")
    plant("codes", _codes, Cause.CHANGED_TEXT.value, position=77, lengths=(3, 6))
    plant("retrieval", _retrieval, Cause.REORDERED.value, position=40)
    plant("tenants", _tenants, Cause.SALT.value)
    plant("replies", _replies, Cause.TOKEN_BOUNDARY.value)
    plant("archive", _archive, Cause.EVICTED.value)
    plant("short", _short, Cause.SHORTER_THAN_BLOCK.value)
    plant("victims", _clean, "preempted", gains=False)
    callers["clean"] = _clean(rng, words, text)
    requests = []
    for number in range(num_rounds):
        for place, (caller, traffic) in enumerate(callers.items()):
            arrival = number + place / len(callers)
            fields = {"request_id": f"{caller}-{number}", "arrival": arrival, "caller": caller, **next(traffic)}
            prompt, output = fields.pop("prompt"), fields.pop("output", [])
            requests.append(
                LoggedRequest(num_tokens=len(prompt), prompt=token_bytes(prompt), output=token_bytes(output), **fields)
            )
    return Example(_as_served(requests), tuple(planted), ("clean",), words)


def _as_served(requests: list[LoggedRequest]) -> list[RequestRecord]:
    log = token_log(requests, BLOCK_SIZE)
    records = []
    for number, (request, served) in enumerate(zip(log.requests, replay_prompts(log, POOL).served, strict=True)):
        computed = request.num_tokens - served.cached
        is_preempted = request.caller == "victims" and number % 4 == 0
        output = unpacked(request.output)
        prefill, decode = 0.0005 * computed, 0.02 * max(1, len(output))
        records.append(
            RequestRecord(
                request_id=request.request_id,
                arrival=request.arrival,
                finish_reason="stop",
                prompt_tokens=request.num_tokens,
                cached_tokens=served.cached,
                computed_tokens=computed + (request.num_tokens if is_preempted else 0),
                output_tokens=max(1, len(output)),
                missed=served.missed,
                preemptions=int(is_preempted),
                queue=0.01 * (number % 7),
                prefill=prefill,
                decode=decode,
                ttft=0.01 * (number % 7) + prefill,
                e2e=0.01 * (number % 7) + prefill + decode,
                caller=request.caller,
                salt=request.salt,
                block_size=BLOCK_SIZE,
                prompt_token_ids=tuple(unpacked(request.prompt)),
                output_token_ids=tuple(output),
            )
        )
    return records


def _clock(rng: random.Random, words: Words, text: Callable[[int], str]) -> Iterator[dict]:
    """The time of day after 100 words and `The time is 2026-11-`."""
    head, behind = text(100), text(300)
    for number in itertools.count():
        # Day and hour vary in both digits from the first request on.
        day, hour, minute = 11 + 7 * number % 18, 10 + 5 * number % 13, rng.randint(10, 59)
        stamp = f"{day:02}T{hour:02}:{minute:02}"
        prompt = words.encode(f"{head} The time is 2026-11-{stamp}.{behind}. {text(20)}")
        yield {"prompt": prompt}


def _codes(rng: random.Random, words: Words, text: Callable[[int], str]) -> Iterator[dict]:
    head, behind = text(77), text(250)
    while True:
        yield {"prompt": words.encode(head + text(rng.randint(3, 6)) + behind + text(20))}


def _retrieval(rng: random.Random, words: Words, text: Callable[[int], str]) -> Iterator[dict]:
    head, documents = text(40), [text(rng.randint(80, 120)) for _ in range(4)]
    while True:
        rng.shuffle(documents)
        yield {"prompt": words.encode(head + "".join(documents) + text(20))}


def _tenants(rng: random.Random, words: Words, text: Callable[[int], str]) -> Iterator[dict]:
    head = text(200)
    for number in itertools.count():
        yield {"prompt": words.encode(head + text(20)), "salt": salt_name(f"tenant {number % 6}")}


def _replies(rng: random.Random, words: Words, text: Callable[[int], str]) -> Iterator[dict]:
    """Talks of three turns. The model spells its answers; sent back as text they are words again."""
    head = text(60)
    while True:
        talk = head
        for _ in range(3):
            talk += text(15)
            answer = text(40)
            yield {"prompt": words.encode(talk), "output": list(answer.encode())}
            talk += answer


def _archive(rng: random.Random, words: Words, text: Callable[[int], str]) -> Iterator[dict]:
    """Twenty long documents asked about in turn."""
    documents = [text(600) for _ in range(20)]
    for document in itertools.cycle(documents):
        yield {"prompt": words.encode(document + text(10))}


def _short(rng: random.Random, words: Words, text: Callable[[int], str]) -> Iterator[dict]:
    head = text(30)  # a block and 14 tokens
    while True:
        yield {"prompt": words.encode(head + text(30))}


def _clean(rng: random.Random, words: Words, text: Callable[[int], str]) -> Iterator[dict]:
    head = text(160)
    while True:
        yield {"prompt": words.encode(head + text(30))}
