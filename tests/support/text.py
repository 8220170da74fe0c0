"""Plain English about well-known facts, for tests on real text."""

PARAGRAPHS = (
    "Water covers about seventy-one percent of the Earth's surface, and almost all of it lies in the oceans. "
    "Only a small share, less than three percent, is fresh, and most of that is frozen in glaciers and ice "
    "sheets. Rivers and lakes, on which most cities depend, hold a tiny fraction of the whole. The water moves "
    "in a cycle: the sun warms the sea, vapour rises, clouds form, and rain or snow brings it back to the land, "
    "where it runs downhill to the sea again.",
    "The printing press with movable type came to Europe around 1450, in the workshop of Johannes Gutenberg in "
    "Mainz. Within fifty years there were presses in more than two hundred towns, and millions of copies had "
    "been printed. Books became cheaper, errors could be corrected in the next edition, and two scholars in "
    "distant towns could for the first time be sure that they were looking at the same page. Maps, tables and "
    "drawings profited most of all, because hand copies of them lose a little each time.",
    "A prime number is a whole number greater than one that can be divided only by one and by itself. The first "
    "primes are 2, 3, 5, 7, 11, 13, 17, 19, 23 and 29. Euclid showed that there is no largest one: multiply any "
    "list of primes, add one, and no prime of the list divides the result, so there must be another. To find all "
    "primes up to a hundred, write the numbers down, then cross out the multiples of two, of three, of five and "
    "of seven; what is left is prime.",
    "Bread needs four things: flour, water, salt and something that makes it rise. Yeast eats the sugar in the "
    "flour and gives off carbon dioxide, which the elastic dough holds in small bubbles. Kneading builds that "
    "elasticity, and time builds the taste, so a cold night in the refrigerator often helps more than another "
    "handful of yeast. When the loaf goes into a hot oven, the gas expands, the crust sets, and the inside stays "
    "soft. It is done when it sounds hollow.",
    "def mean(values):\n    total = 0.0\n    for value in values:\n        total += value\n    return total / "
    "len(values)\n\nThe function above adds up a list of numbers and divides the sum by how many there are. It "
    "fails on an empty list, because nothing can be divided by zero. A careful author would raise an error that "
    "says so, or would return nothing.",
    "Light takes about eight minutes and twenty seconds from the Sun to the Earth, and a little more than one "
    "second from the Moon. The nearest star beyond the Sun, Proxima Centauri, is more than four light years "
    "away, so what we see of it tonight left it four years ago. With the naked eye, far from the lamps of a "
    "town, one can see the Andromeda galaxy, a faint oval whose light set out some two and a half million years "
    "ago, long before there were people to look at it.",
)

TEXT = "\n\n".join(PARAGRAPHS)


def long_text(num_paragraphs: int, start: int = 0) -> str:
    """Paragraphs in a circle, beginning with the start-th."""
    return "\n\n".join(PARAGRAPHS[(start + i) % len(PARAGRAPHS)] for i in range(num_paragraphs))
