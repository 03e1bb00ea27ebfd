"""Makes 72 prompts whose answers repeat themselves: the data of the smoke recipe, made in seconds and soon learnt.

python examples/make_smoke_prompts.py data/smoke-prompts.jsonl

Six templates times twelve values, in an order that a seed fixes. A drafter that has seen most of them is right about
the rest far sooner than about real text: what it reaches on them shows that a set-up works and nothing else.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

WORDS = (
    "apple", "river", "lamp", "copper", "window", "garden", "pepper", "marble", "ticket", "harbor", "violin", "pencil",
)  # fmt: skip
SENTENCES = (
    "The kettle is on.", "Snow fell at noon.", "My shoes are wet.", "The door was open.", "Birds sing early.",
    "We sold the boat.", "Her coat is green.", "The soup is hot.", "He found a coin.", "Trains run late.",
    "The cat sleeps.", "Rain is coming.",
)  # fmt: skip
STARTS = (1, 4, 7, 11, 16, 20, 23, 29, 34, 40, 45, 51)
SEED = 0


def smoke_prompts() -> list[str]:
    """All of them, shuffled: templates of the last ones, which a run holds out, occur among the others."""
    prompts = [f"Repeat the word {word} ten times, separated by spaces." for word in WORDS]
    prompts += [f"Write this sentence five times, one per line: {sentence}" for sentence in SENTENCES]
    prompts += [f"Count from {start} to {start + 14}, separated by commas." for start in STARTS]
    prompts += [f"List the seven days of the week in order, then the word {word}." for word in WORDS]
    prompts += [f"List the twelve months of the year in order, then the word {word}." for word in WORDS]
    prompts += [f"Write a Python loop that prints the word {word} {2 + i} times." for i, word in enumerate(WORDS)]
    random.Random(SEED).shuffle(prompts)
    return prompts


def main() -> None:
    """Write one JSON object per line, as `paceline capture prompts --from` reads them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    output = parser.parse_args().output
    output.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"id": f"smoke-{index:03}", "prompt": text}) for index, text in enumerate(smoke_prompts())]
    output.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
