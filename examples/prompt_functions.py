"""Python functions to be completed: a signature, a sentence about it, and examples that really hold.

Each entry is written once as a function that runs; the examples of a prompt are its results on random arguments. So
there are as many different prompts as wanted, and none of them asks for something untrue.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Task:
    """A function to be written.

    Attributes:
        signature: name and typed parameters, without `def`.
        sentence: what it does, as in a docstring.
        run: the function itself, for the examples.
        draw: arguments of one example.
    """

    signature: str
    sentence: str
    run: Callable[..., Any]
    draw: Callable[[random.Random], tuple[Any, ...]]

    @property
    def name(self) -> str:
        """The function's name."""
        return self.signature.partition("(")[0]


def numbers(rng: random.Random) -> list[int]:
    """A few small integers."""
    return [rng.randint(-9, 30) for _ in range(rng.randint(3, 6))]


def words(rng: random.Random) -> list[str]:
    """A few short words."""
    return rng.sample(_WORDS, rng.randint(2, 5))


def sentence(rng: random.Random) -> str:
    """Some words with blanks between them."""
    return " ".join(rng.sample(_WORDS, rng.randint(3, 6)))


_WORDS = [
    "river",
    "stone",
    "lamp",
    "green",
    "quiet",
    "paper",
    "cloud",
    "seven",
    "garden",
    "winter",
    "apple",
    "music",
    "train",
    "yellow",
    "bridge",
    "silver",
    "summer",
    "letter",
    "window",
    "orange",
    "castle",
    "dragon",
    "pencil",
    "morning",
    "forest",
    "little",
    "bottle",
    "rabbit",
]


def _runs(values: Sequence[int]) -> int:
    return sum(1 for i, value in enumerate(values) if i == 0 or value != values[i - 1])


def _digits(number: int) -> list[int]:
    return [int(digit) for digit in str(abs(number))]


TASKS = (
    Task(
        "gap(values: list[int]) -> int",
        "Return the largest value minus the smallest one.",
        lambda v: max(v) - min(v),
        lambda r: (numbers(r),),
    ),
    Task(
        "without_negatives(values: list[int]) -> list[int]",
        "Return the values that are not below zero, in order.",
        lambda v: [x for x in v if x >= 0],
        lambda r: (numbers(r),),
    ),
    Task(
        "every_second(values: list[int]) -> list[int]",
        "Return the first, third, fifth value and so on.",
        lambda v: v[::2],
        lambda r: (numbers(r),),
    ),
    Task(
        "differences(values: list[int]) -> list[int]",
        "Return the difference of each value to the one before it.",
        lambda v: [b - a for a, b in itertools.pairwise(v)],
        lambda r: (numbers(r),),
    ),
    Task(
        "running_maximum(values: list[int]) -> list[int]",
        "Return, for each place, the largest value so far.",
        lambda v: [max(v[: i + 1]) for i in range(len(v))],
        lambda r: (numbers(r),),
    ),
    Task(
        "count_above(values: list[int], limit: int) -> int",
        "Return how many values are larger than the limit.",
        lambda v, n: sum(x > n for x in v),
        lambda r: (numbers(r), r.randint(0, 15)),
    ),
    Task(
        "is_rising(values: list[int]) -> bool",
        "Return whether each value is larger than the one before it.",
        lambda v: all(a < b for a, b in itertools.pairwise(v)),
        lambda r: (sorted(numbers(r)),),
    ),
    Task(
        "swap_ends(values: list[int]) -> list[int]",
        "Return a copy in which the first and last value changed places.",
        lambda v: [v[-1], *v[1:-1], v[0]],
        lambda r: (numbers(r),),
    ),
    Task(
        "middle(values: list[int]) -> int",
        "Return the value in the middle of the sorted list.",
        lambda v: sorted(v)[len(v) // 2],
        lambda r: (numbers(r),),
    ),
    Task(
        "sum_of_squares(values: list[int]) -> int",
        "Return the sum of the squares of all values.",
        lambda v: sum(x * x for x in v),
        lambda r: (numbers(r),),
    ),
    Task(
        "odd_product(values: list[int]) -> int",
        "Return the product of the odd values, 1 if there are none.",
        lambda v: _product(x for x in v if x % 2),
        lambda r: (numbers(r),),
    ),
    Task(
        "count_runs(values: list[int]) -> int",
        "Return into how many runs of equal neighbours the list falls.",
        _runs,
        lambda r: ([r.randint(0, 2) for _ in range(7)],),
    ),
    Task(
        "interleave(first: list[int], second: list[int]) -> list[int]",
        "Return the values of both lists in turns; both have the same length.",
        lambda a, b: [x for pair in zip(a, b, strict=True) for x in pair],
        lambda r: ([r.randint(0, 9) for _ in range(3)], [r.randint(0, 9) for _ in range(3)]),
    ),
    Task(
        "index_of_smallest(values: list[int]) -> int",
        "Return where the smallest value stands first.",
        lambda v: v.index(min(v)),
        lambda r: (numbers(r),),
    ),
    Task(
        "clamp_all(values: list[int], low: int, high: int) -> list[int]",
        "Return the values with everything below low raised to low and everything above high lowered to high.",
        lambda v, a, b: [min(max(x, a), b) for x in v],
        lambda r: (numbers(r), r.randint(0, 5), r.randint(10, 20)),
    ),
    Task(
        "initials(names: list[str]) -> str",
        "Return the first letters of all names as one capital string.",
        lambda v: "".join(x[0].upper() for x in v),
        lambda r: (words(r),),
    ),
    Task(
        "longest(names: list[str]) -> str",
        "Return the longest name, the earliest one of several.",
        lambda v: max(v, key=len),
        lambda r: (words(r),),
    ),
    Task(
        "count_vowels(text: str) -> int",
        "Return the number of vowels in the text.",
        lambda t: sum(c in "aeiou" for c in t.lower()),
        lambda r: (sentence(r),),
    ),
    Task(
        "swap_case(text: str) -> str",
        "Return the text with small and capital letters exchanged.",
        str.swapcase,
        lambda r: (sentence(r).title(),),
    ),
    Task(
        "reverse_words(text: str) -> str",
        "Return the words of the text in the opposite order.",
        lambda t: " ".join(t.split()[::-1]),
        lambda r: (sentence(r),),
    ),
    Task(
        "word_lengths(text: str) -> dict[str, int]",
        "Return the length of each word of the text.",
        lambda t: {w: len(w) for w in t.split()},
        lambda r: (sentence(r),),
    ),
    Task(
        "remove_letter(text: str, letter: str) -> str",
        "Return the text without any occurrence of the letter.",
        lambda t, c: t.replace(c, ""),
        lambda r: (sentence(r), r.choice("aeiour")),
    ),
    Task(
        "repeat_letters(text: str, times: int) -> str",
        "Return the text with every letter repeated.",
        lambda t, n: "".join(c * n for c in t),
        lambda r: (r.choice(_WORDS), r.randint(2, 3)),
    ),
    Task(
        "is_mirror(text: str) -> bool",
        "Return whether the text reads the same from both ends.",
        lambda t: t == t[::-1],
        lambda r: (r.choice(["level", "noon", "river", "radar", "lamp", "stats"]),),
    ),
    Task(
        "acronym(text: str) -> str",
        "Return the first letter of each word, in capitals, with dots after them.",
        lambda t: "".join(w[0].upper() + "." for w in t.split()),
        lambda r: (sentence(r),),
    ),
    Task(
        "shared_letters(first: str, second: str) -> list[str]",
        "Return the letters that both words have, sorted.",
        lambda a, b: sorted(set(a) & set(b)),
        lambda r: tuple(r.sample(_WORDS, 2)),
    ),
    Task(
        "digit_sum(number: int) -> int",
        "Return the sum of the digits of the number.",
        lambda n: sum(_digits(n)),
        lambda r: (r.randint(10, 99999),),
    ),
    Task(
        "largest_digit(number: int) -> int",
        "Return the largest digit of the number.",
        lambda n: max(_digits(n)),
        lambda r: (r.randint(10, 99999),),
    ),
    Task(
        "divisors(number: int) -> list[int]",
        "Return all divisors of the number, the smallest first.",
        lambda n: [d for d in range(1, n + 1) if n % d == 0],
        lambda r: (r.randint(6, 60),),
    ),
    Task(
        "is_square(number: int) -> bool",
        "Return whether the number is the square of a whole number.",
        lambda n: int(n**0.5) ** 2 == n,
        lambda r: (r.choice([9, 16, 20, 49, 50, 81, 90]),),
    ),
    Task(
        "count_steps(start: int, step: int, limit: int) -> int",
        "Return how often step can be added to start before the limit is passed.",
        lambda a, s, n: max(0, (n - a) // s),
        lambda r: (r.randint(0, 5), r.randint(2, 6), r.randint(20, 50)),
    ),
    Task(
        "minutes(text: str) -> int",
        "Return the minutes since midnight of a time such as 07:45.",
        lambda t: int(t[:2]) * 60 + int(t[3:]),
        lambda r: (f"{r.randint(0, 23):02d}:{r.randint(0, 59):02d}",),
    ),
    Task(
        "celsius_list(values: list[int]) -> list[float]",
        "Return degrees Fahrenheit as Celsius, with one decimal.",
        lambda v: [round((x - 32) * 5 / 9, 1) for x in v],
        lambda r: ([r.randint(20, 110) for _ in range(3)],),
    ),
    Task(
        "price_with_tax(price: float, percent: float) -> float",
        "Return the price with tax, with two decimals.",
        lambda p, t: round(p * (1 + t / 100), 2),
        lambda r: (float(r.randint(5, 90)), float(r.choice([5, 7, 19, 20]))),
    ),
    Task(
        "grid(rows: int, columns: int) -> list[list[int]]",
        "Return rows of zeros.",
        lambda a, b: [[0] * b for _ in range(a)],
        lambda r: (r.randint(1, 3), r.randint(2, 4)),
    ),
    Task(
        "diagonal(table: list[list[int]]) -> list[int]",
        "Return the values from the upper left to the lower right.",
        lambda t: [row[i] for i, row in enumerate(t)],
        lambda r: ([[r.randint(0, 9) for _ in range(3)] for _ in range(3)],),
    ),
    Task(
        "row_sums(table: list[list[int]]) -> list[int]",
        "Return the sum of every row.",
        lambda t: [sum(row) for row in t],
        lambda r: ([[r.randint(0, 9) for _ in range(3)] for _ in range(2)],),
    ),
    Task(
        "positions(values: list[int], wanted: int) -> list[int]",
        "Return all places at which the wanted value stands.",
        lambda v, w: [i for i, x in enumerate(v) if x == w],
        lambda r: ([r.randint(0, 3) for _ in range(6)], 2),
    ),
    Task(
        "keys_with_value(table: dict[str, int], value: int) -> list[str]",
        "Return the keys that have the value.",
        lambda t, v: [k for k, x in t.items() if x == v],
        lambda r: ({w: r.randint(1, 3) for w in words(r)}, 2),
    ),
    Task(
        "total_by_name(orders: list[tuple[str, int]]) -> dict[str, int]",
        "Return the sum of the amounts of each name.",
        lambda v: {n: sum(a for m, a in v if m == n) for n, _ in v},
        lambda r: ([(r.choice(["ann", "bob", "cat"]), r.randint(1, 9)) for _ in range(4)],),
    ),
)


def _product(values: Any) -> int:
    result = 1
    for value in values:
        result *= value
    return result


def function_prompt(rng: random.Random) -> str:
    """A request to write one of the functions."""
    task = rng.choice(TASKS)
    examples = [task.draw(rng) for _ in range(rng.randint(1, 3))]
    calls = [(f"{task.name}({', '.join(map(repr, arguments))})", repr(task.run(*arguments))) for arguments in examples]
    doctest = "".join(f"    >>> {call}\n    {result}\n" for call, result in calls)
    stub = f'def {task.signature}:\n    """{task.sentence}\n\n{doctest}    """\n'
    asserts = "\n".join(f"assert {call} == {result}" for call, result in calls)
    what = task.sentence[0].lower() + task.sentence[1:].rstrip(".")
    return rng.choice(
        (
            f"Complete this function:\n\n{stub}",
            f"Write the body of this Python function.\n\n```python\n{stub}```",
            f"```python\n{stub}```\nFill in the missing code.",
            f"Implement `{task.signature}` in Python. It should {what}.",
            f"I need a Python function called {task.name}. {task.sentence} {calls[0][0]} is {calls[0][1]}.",
            f"Write Python code for which these lines pass:\n\n{asserts}\n\nThe function should {what}.",
            f"Please {what} in Python, as a function `{task.name}`, and explain the code.",
            f"Here is a function without a body:\n\n{stub}\nGive me the full code and describe how it works.",
        )
    )
