"""Worked maths, questions on a passage and summaries, made up from a seed: what a KV format must not spoil.

They are templates filled with names and numbers, no benchmark: easy, alike, and with one right answer each. What they show is
whether a format costs more where every digit or name must be copied from far back; how well a model solves such tasks, they
don't.
"""

import dataclasses
import random

KINDS = ("maths", "qa", "summaries")


@dataclasses.dataclass(frozen=True)
class Task:
    """What is given, and what should follow; the answer begins with a space and ends with an empty line."""

    prompt: str
    answer: str


def make_tasks(kind: str, count: int, *, seed: int = 0) -> list[Task]:
    """`count` tasks of one of KINDS; the same for the same seed."""
    rng = random.Random(f"{kind} {seed}")
    make = {"maths": _maths, "qa": _question, "summaries": _summary}[kind]
    return [make(rng) for _ in range(count)]


_PEOPLE = ("Anna Keller", "Tom Baker", "Mei Tanaka", "Omar Haddad", "Ines Costa", "Paul Nowak", "Ruth Stein", "Ivan Petrov",
           "Lena Berg", "Sam Okoro", "Clara Diaz", "Noah Weiss")  # fmt: skip
_TOWNS = ("Lund", "Porto", "Graz", "Leeds", "Turin", "Ghent", "Basel", "Cork", "Lyon", "Bergen", "Gdansk", "Aarhus")
_THINGS = ("pencils", "apples", "stamps", "bricks", "tickets", "candles", "buttons", "eggs")
_BUILDINGS = ("library", "bridge", "theatre", "railway station", "museum", "town hall", "swimming pool", "market hall")
_MATERIALS = ("stone", "brick", "oak", "steel", "concrete", "glass")
_TROUBLES = (
    "a flood in the cellar",
    "a strike of the masons",
    "a fire on the roof",
    "a late delivery of steel",
    "an argument over the money",
    "a very cold winter",
)
_VISITS = ("school classes", "tourists", "students", "families", "pensioners", "musicians")


def _maths(rng: random.Random) -> Task:
    name, thing = rng.choice(_PEOPLE).split()[0], rng.choice(_THINGS)
    boxes, each = rng.randint(6, 29), rng.randint(11, 48)
    total = boxes * each
    tens, ones = each // 10 * 10, each % 10
    steps = [f"{boxes} * {each} = {boxes} * {tens} + {boxes} * {ones} = {boxes * tens} + {boxes * ones} = {total}"]
    text = f"{name} has {boxes} boxes with {each} {thing} each"
    match rng.randrange(3):
        case 0:
            gone = rng.randint(10, total - 20)
            text += f", and gives {gone} {thing} away. How many {thing} are left?"
            steps.append(f"{total} - {gone} = {total - gone}")
            result = f"{total - gone} {thing} are left"
        case 1:
            more = rng.randint(50, 400)
            price = rng.randint(2, 9)
            text += f", and buys {more} more at {price} dollars each. How many {thing} are there, and what did the new ones cost?"
            steps += [f"{total} + {more} = {total + more}", f"{more} * {price} = {more * price}"]
            result = f"there are {total + more} {thing}, and the new ones cost {more * price} dollars"
        case _:
            bags = rng.randint(7, 19)
            text += f", and fills bags of {bags}. How many bags are full, and how many {thing} remain?"
            full = total // bags
            steps += [f"{total} / {bags} is {full}, since {full} * {bags} = {full * bags}"]
            steps += [f"{total} - {full * bags} = {total - full * bags}"]
            result = f"{full} bags are full, and {total - full * bags} {thing} remain"
    return Task(f"Question: {text}\nAnswer:", f" {'. '.join(steps)}. So {result}.\n\n")


@dataclasses.dataclass(frozen=True)
class _Building:
    building: str
    town: str
    architect: str
    mayor: str
    start: int
    years: int
    material: str
    cost: int
    trouble: str
    visitors: int
    who: str

    @property
    def opened(self) -> int:
        return self.start + self.years

    @classmethod
    def made_up(cls, rng: random.Random) -> "_Building":
        architect, mayor = rng.sample(_PEOPLE, 2)
        return cls(
            rng.choice(_BUILDINGS), rng.choice(_TOWNS), architect, mayor, rng.randint(1881, 1989), rng.randint(2, 9),
            rng.choice(_MATERIALS), rng.randint(3, 95) * 10, rng.choice(_TROUBLES), rng.randint(12, 98) * 100,
            rng.choice(_VISITS),
        )  # fmt: skip

    def passage(self, rng: random.Random) -> str:
        """The first sentence, and the others in any order."""
        others = [
            f"The plans came from {self.architect}, who chose {self.material} for the walls.",
            f"It cost {self.cost} thousand crowns, a sum that the mayor, {self.mayor}, had to defend in the council.",
            f"Work was held up by {self.trouble}.",
            f"In its first year {self.visitors} people came to see it, most of them {self.who}.",
            f"The doors opened in {self.opened}, {self.years} years after the first stone was laid.",
        ]
        rng.shuffle(others)
        return " ".join([f"The {self.building} of {self.town} was begun in {self.start}.", *others])


def _question(rng: random.Random) -> Task:
    of = _Building.made_up(rng)
    name = f"the {of.building} of {of.town}"
    question, answer = rng.choice([
        (f"Who made the plans of {name}?", f"{of.architect} made the plans of {name}"),
        (f"When did {name} open?", f"It opened in {of.opened}, {of.years} years after it was begun in {of.start}"),
        (f"What did {name} cost, and who defended the sum?", f"It cost {of.cost} thousand crowns, and {of.mayor} defended the sum"),
        (f"What held up the work on {name}?", f"The work was held up by {of.trouble}"),
        ("How many people came in the first year, and who were they?", f"{of.visitors} people came, most of them {of.who}"),
    ])  # fmt: skip
    return Task(f"Passage: {of.passage(rng)}\nQuestion: {question}\nAnswer:", f" {answer}.\n\n")


def _summary(rng: random.Random) -> Task:
    of = _Building.made_up(rng)
    summary = (
        f"The {of.building} of {of.town}, planned by {of.architect} in {of.material}, was built from {of.start} to "
        f"{of.opened} for {of.cost} thousand crowns, in spite of {of.trouble}."
    )
    return Task(f"Passage: {of.passage(rng)}\nSummary:", f" {summary}\n\n")
