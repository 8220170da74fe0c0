"""Token sequences whose next-token distributions are compared: windows of texts, and tasks with the answers marked."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from benchlib.task_texts import make_tasks
from jaxkv.kv_quality import TokenFigures
from jaxkv.tokenization.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class QualitySequence:
    """Tokens in their order.

    Attributes:
      kind: "text", or of which tasks. scored: positions that count, none the last; None: all.
    """

    kind: str
    token_ids: tuple[int, ...]
    scored: tuple[int, ...] | None = None

    @property
    def num_scored(self) -> int:
        return len(self.token_ids) if self.scored is None else len(self.scored)

    def select(self, figures: TokenFigures) -> TokenFigures:
        return figures if self.scored is None else TokenFigures(*(part[np.array(self.scored)] for part in figures))


def windows(texts: Sequence[str], tokenizer: Tokenizer, size: int, limit: int | None) -> list[QualitySequence]:
    """Sequences of at most `size` tokens, each with what the tokenizer puts in front of a prompt. Of a text longer than
    that the end, which fills no window, is left out: its tokens would see less than those of the others."""
    front = tokenizer.encode("")
    room = max(size - len(front), 1)
    found: list[list[int]] = []
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        cut = [ids[start : start + room] for start in range(0, max(len(ids) // room, 1) * room, room)]
        found += [front + part for part in cut if len(front + part) > 1]
        if limit and len(found) >= limit:
            break
    return [QualitySequence("text", tuple(ids)) for ids in found[:limit]]


def task_windows(kind: str, tokenizer: Tokenizer, size: int, count: int) -> list[QualitySequence]:
    """`count` sequences of at most `size` tokens, filled with tasks one after the other, so that the answers see many
    keys. Only their tokens are scored. None where `size` has no room for a task."""
    found = []
    for seed in range(count):
        ids, scored = list(tokenizer.encode("")), []
        for task in make_tasks(kind, size // 20 + 1, seed=seed):
            prompt, answer = (tokenizer.encode(part, add_special_tokens=False) for part in (task.prompt, task.answer))
            if len(ids) + len(prompt) + len(answer) > size:
                break
            ids += prompt
            scored += range(len(ids) - 1, len(ids) + len(answer) - 1)  # a position's distribution is the next token's
            ids += answer
        if scored:
            found.append(QualitySequence(kind, tuple(ids), tuple(scored)))
    return found
