"""What the articles' users ask, made up from a seed."""

import itertools
import random
from collections.abc import Iterator

from articlelib.driver import Session, Tokens, Turn

# Ids below are special tokens in many vocabularies.
_FIRST_ID = 100


class Words:
    """Random tokens."""

    def __init__(self, vocab_size: int, seed: int = 0):
        self._random = random.Random(seed)
        self._vocab_size = vocab_size

    def take(self, count: int) -> Tokens:
        first = min(_FIRST_ID, self._vocab_size // 4)
        return tuple(self._random.choices(range(first, self._vocab_size), k=count))

    def between(self, low: int, high: int) -> int:
        return self._random.randint(low, high)

    def gap(self, rate: float) -> float:
        """Seconds between two arrivals of a Poisson process."""
        return self._random.expovariate(rate)

    def chance(self, share: float) -> bool:
        return self._random.random() < share


def customer_service(
    vocab_size: int,
    *,
    num_sessions: int,
    session_rate: float,
    system_len: int,
    question: tuple[int, int] = (60, 260),
    answer: tuple[int, int] = (30, 90),
    think: float = 60.0,
    goes_on: float = 0.4,
    most_turns: int = 5,
    seed: int = 0,
) -> list[Session]:
    """One system prompt for all; a user asks, and with a chance of `goes_on` asks again after some `think` seconds.

    Args:
      session_rate: users a second; requests are 1 / (1 - goes_on) times as many, cut at `most_turns`.
    """
    words = Words(vocab_size, seed)
    system, now, sessions = words.take(system_len), 0.0, []
    for _ in range(num_sessions):
        turns: list[Turn] = []
        while not turns or (len(turns) < most_turns and words.chance(goes_on)):
            own = words.take(words.between(*question))
            turns.append(Turn(own if turns else system + own, words.between(*answer), words.gap(1 / think)))
        sessions.append(Session(now, tuple(turns)))
        now += words.gap(session_rate)
    return sessions


def session_rate_for(sessions: list[Session], requests_per_second: float, answer_seconds: float = 1.0) -> float:
    """Sessions a second at which the requests come as often as asked for in the second half of the time in which sessions
    arrive: before that, few have come back.

    Args:
      sessions: made at one a second; at another rate their arrivals are as many times closer, and people think as long.
      answer_seconds: that answers take, roughly.
    """
    end = sessions[-1].arrival
    waits = [
        list(itertools.accumulate([0.0, *(answer_seconds + turn.think for turn in session.turns[1:])]))
        for session in sessions
    ]

    def offered(rate: float) -> float:
        count = sum(
            end / rate / 2 < session.arrival / rate + wait <= end / rate
            for session, of_session in zip(sessions, waits, strict=True)
            for wait in of_session
        )
        return count / (end / rate / 2)

    low, high = 0.0, requests_per_second
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if offered(middle) < requests_per_second else (low, middle)
    return high


def single(
    prompts: Iterator[Tokens], count: int, rate: float, output_len: int, *, caller: str = "", seed: int = 0
) -> list[Session]:
    """`count` requests, arriving as a Poisson process."""
    words, now, sessions = Words(1000, seed), 0.0, []
    for prompt in itertools.islice(prompts, count):
        sessions.append(Session(now, (Turn(prompt, output_len),), caller))
        now += words.gap(rate)
    return sessions


def behind_prefix(vocab_size: int, shared_len: int, own_len: int, seed: int = 0) -> Iterator[Tokens]:
    """Prompts with one common prefix."""
    words = Words(vocab_size, seed)
    shared = words.take(shared_len)
    while True:
        yield shared + words.take(own_len)


def about_documents(
    vocab_size: int,
    *,
    num_documents: int,
    document_len: int,
    a_prompt: int,
    question_len: int,
    sorts: bool,
    seed: int = 0,
) -> Iterator[Tokens]:
    """Questions behind `a_prompt` of the documents, which come in a fixed order (`sorts`) or in any."""
    words, order = Words(vocab_size, seed), random.Random(seed)
    documents = [words.take(document_len) for _ in range(num_documents)]
    groups = [tuple(range(i, i + a_prompt)) for i in range(0, num_documents - a_prompt + 1, a_prompt)]
    while True:
        group = list(order.choice(groups))
        if not sorts:
            order.shuffle(group)
        yield sum((documents[i] for i in group), ()) + words.take(question_len)
