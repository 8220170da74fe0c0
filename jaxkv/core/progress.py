"""How long work reports itself, without knowing who shows it."""

from typing import Protocol


class Progress(Protocol):
    def update(self, stage: str, done: int, total: int, unit: str = "") -> None:
        """`stage` has finished `done` of `total` units ("B" for bytes). A stage ends when done == total."""
        ...


class SilentProgress:
    def update(self, stage: str, done: int, total: int, unit: str = "") -> None:
        pass
