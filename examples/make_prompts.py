"""Makes a file of prompts from templates and word lists of our own, which a target then answers:

python -m examples.make_prompts data/prompts.jsonl --num-prompts 60000 --exclude prompts/first.jsonl
paceline capture prompts smollm2-135m-instruct data/answers --from data/prompts.jsonl --exclude prompts/first.jsonl

A drafter that saw self-chat alone drafts well for self-chat: a small target asks itself narrow questions. These prompts
are of the kinds that people send: explanations, word problems, code, rewriting, lists, letters and stories.
A prompt that shares six words in a row with a prompt of `--exclude` is not made, so that evaluation stays evaluation.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from examples.prompt_functions import function_prompt

from paceline.capture.exclusion import Exclusion

SHARED_WORDS = 6


def read_words(file: Path) -> dict[str, list[str]]:
    """Lists by name; entries are kept apart by bars."""
    lists = tomllib.loads(file.read_text(encoding="utf-8"))
    return {name: [" ".join(entry.split()) for entry in text.split("|")] for name, text in lists.items()}


WORDS = read_words(Path(__file__).with_name("prompt_words.toml"))


def explanation(rng: random.Random) -> str:
    """A question about a topic or two."""
    topic, other = rng.sample(WORDS["topics"], 2)
    forms = (
        f"Explain {topic} {rng.choice(WORDS['styles'])}.",
        f"What is important to know about {topic}?",
        f"Why is it useful to know something about {topic}?",
        f"How would {rng.choice(WORDS['roles'])} describe {topic}?",
        f"Compare {topic} and {other}.",
        f"What do {topic} and {other} have in common?",
        f"Write a short introduction to {topic}.",
        f"Give me {rng.randint(3, 7)} facts about {topic}.",
        f"What are the advantages and disadvantages of {topic}?",
        f"Summarise the history of {topic} {rng.choice(WORDS['styles'])}.",
        f"What are common mistakes with {topic}, and how can they be avoided?",
        f"Tell me about {topic}.",
        f"I want to learn about {topic}. Where should I begin?",
        f"Is it true that {topic} can be dangerous? Explain.",
        f"You are {rng.choice(WORDS['roles'])}. A visitor asks you about {topic}. What do you say?",
    )
    return rng.choice(forms)


def problem(rng: random.Random) -> str:
    """A word problem with small numbers."""
    a, b, c = rng.randint(3, 60), rng.randint(2, 12), rng.randint(2, 9)
    who, friend = rng.sample(WORDS["names"], 2)
    thing, place = rng.choice(WORDS["things"]), rng.choice(WORDS["places"])
    forms = (
        f"{who} has {a} {thing} and buys {b} more at the {place}. How many {thing} does {who} have now?",
        f"{who} has {a + b} {thing} and gives {b} of them to {friend}. How many are left?",
        f"A box holds {b} {thing}. How many {thing} are in {a} boxes?",
        f"{who} and {friend} share {b * c} {thing} equally among {c} people. How many does each person get?",
        f"{who} earns ${a} an hour and works {b} hours on each of {c} days. How much does {who} earn in total?",
        f"A ticket costs ${b}. A group of {a} people pays with a discount of ${c} in all. How much do they pay?",
        f"{who} reads {b} pages a day. How many days does a book of {b * a} pages take?",
        f"A car drives {a * 10} km on {b} litres of fuel. How far does it drive on {b * c} litres?",
        f"The {place} had {a * 10} visitors on Monday and {b * 10} more on Tuesday. How many came on both days?",
        f"What is {a} plus {b} times {c}?",
        f"What is {rng.choice((5, 10, 15, 20, 25, 40, 50))}% of {a * 10}?",
        f"A rectangle is {a} cm long and {b} cm wide. What are its perimeter and its area?",
        f"{who} saves ${b} every week for {a} weeks, then spends ${c * 5}. How much money is left?",
        f"{who} is {a} years old. {friend} is {c} years younger. How old will {friend} be in {b} years?",
        f"{who} cuts a rope of {a * b} metres into {b} equal pieces. How long are {c} of these pieces together?",
    )
    ending = rng.choice(("", " Think step by step.", " Show your work.", " Explain your reasoning."))
    return rng.choice(forms) + ending


def code(rng: random.Random) -> str:
    """A small programming task."""
    task = rng.choice(WORDS["code_tasks"])
    language = rng.choices(("Python", "JavaScript", "Java", "C", "Bash"), weights=(12, 3, 2, 1, 1))[0]
    name = "_".join(re.sub("[^a-z ]", "", task.lower()).split()[:3])
    forms = (
        f"Write a {language} function that {task}.",
        f"Write a {language} program that {task}. Add comments.",
        f"How do I write a function that {task} in {language}?",
        f'Complete this Python function:\n\ndef {name}(values):\n    """A function that {task}."""\n',
        f"Write a Python function `{name}` that {task}, and show two examples of its use.",
        f"Give me {language} code that {task}, and explain how it works.",
        f"Write a Python class with a method that {task}.",
        f"Write a unit test for a Python function that {task}.",
    )
    return rng.choice(forms)


def rewriting(rng: random.Random) -> str:
    """Work on a sentence that is given."""
    first, second = rng.sample(WORDS["sentences"], 2)
    forms = (
        f"Rewrite this in the past tense: {first}.",
        f"Rewrite this in the future tense: {second}.",
        f"Turn this into a question: {first}.",
        f"Make this more formal: {first}, and {second[0].lower() + second[1:]}.",
        f"Say this in other words: {first}.",
        f"Join these two sentences: {first}. {second}.",
        f"Which nouns and verbs are in this sentence? {first}.",
        f"Make this longer and more vivid: {first}.",
        f"Translate this to Spanish: {first}.",
        f"Translate this to French: {second}.",
        f"Answer from the text. Text: {first}. {second}. Question: What happens first, and what happens next?",
    )
    return rng.choice(forms)


def making(rng: random.Random) -> str:
    """A list, a letter, a story, a plan."""
    topic, place, who = rng.choice(WORDS["topics"]), rng.choice(WORDS["places"]), rng.choice(WORDS["names"])
    count = rng.randint(3, 10)
    forms = (
        f"List {count} questions that one could ask about {topic}.",
        f"List {count} things that one finds at a {place}.",
        f"Give me {count} ideas for a talk about {topic}.",
        f"Write an email {rng.choice(WORDS['letters'])}.",
        f"Write a polite letter {rng.choice(WORDS['letters'])}.",
        f"Write a short message {rng.choice(WORDS['letters'])}.",
        f"Write a short story about {who}, who loses something at the {place}.",
        f"Write a short story about {topic} with a surprising end.",
        f"Write a poem about {topic}.",
        f"Write a dialogue between {who} and {rng.choice(WORDS['roles'])} about {topic}.",
        f"Make a plan for learning about {topic} in {count} days.",
        f"Write a product description for a book about {topic}.",
        f"Suggest {count} titles for an article about {topic}.",
        f"Make a table with three columns about {topic}.",
        f"Write step-by-step instructions for a visitor of a {place}.",
        f"What should I bring to a {place}? Give me a checklist with {count} items.",
    )
    return rng.choice(forms)


KINDS: Sequence[tuple[Callable[[random.Random], str], float]] = (
    (explanation, 0.28),
    (problem, 0.22),
    (code, 0.12),
    (function_prompt, 0.13),
    (rewriting, 0.08),
    (making, 0.17),
)


def make_prompts(num_prompts: int, seed: int, excluded: Exclusion) -> Iterator[str]:
    """Different prompts, none of which shares a run of words with what is excluded."""
    rng = random.Random(seed)
    makers, weights = zip(*KINDS, strict=True)
    seen: set[str] = set()
    attempts = 0
    while len(seen) < num_prompts and attempts < 20 * num_prompts:
        attempts += 1
        text = rng.choices(makers, weights=weights)[0](rng)
        if text not in seen and not excluded.covers(text):
            seen.add(text)
            yield text


def main() -> None:
    """Write one JSON object with the key `prompt` per line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--num-prompts", type=int, default=60000)
    parser.add_argument("--exclude", type=Path, nargs="*", default=[Path("prompts/first.jsonl")], metavar="FILE")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    made = list(make_prompts(arguments.num_prompts, arguments.seed, Exclusion(arguments.exclude, SHARED_WORDS)))
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in made), encoding="utf-8")
    print(f"{len(made)} prompts, seed {arguments.seed}: {arguments.output}")


if __name__ == "__main__":
    main()
