"""Where the answers of a trace come from, as rows of a table, and the command that repeats one of them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping

from paceline.configuration.generation import GenerateRun
from paceline.trace.answer import RunFacts, TracedAnswer

# Settings that say where a run's output goes, which prompts it has or how many at once; none changes one answer.
_NOT_OF_ONE_ANSWER = frozenset(
    (
        "model",
        "draft_model",
        "prompts",
        "num_prompts",
        "max_num_seqs",
        "n",
        "seed",
        "compare",
        "trace",
        "trace_file",
        "trace_details",
        "logprobs",
        "logprobs_mode",
        "logit_bias",
    )
)
_MOST_SHOWN = 2000  # characters of a value
_ALWAYS_OTHERS = frozenset(("date", "command", "settings.trace_file"))
_MOST_TEXT = 4000  # characters of a prompt that a command line is given


def provenance_rows(run: RunFacts) -> list[tuple[str, str]]:
    """What a run's line says, flat: names with dots, values as text, nothing left out."""
    rows: list[tuple[str, str]] = []

    def walk(prefix: str, value: object) -> None:
        if isinstance(value, Mapping):
            for key, inner in value.items():
                walk(f"{prefix}.{key}" if prefix else str(key), inner)
        elif isinstance(value, list) and value and all(isinstance(each, Mapping) for each in value):
            for index, inner in enumerate(value):
                walk(f"{prefix}[{index}]", inner)
        else:
            rows.append((prefix, shortened(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))))

    walk("", run)
    return rows


def shortened(text: str, most: int = _MOST_SHOWN) -> str:
    """A text as far as there is room for it, and how much more there is."""
    return text if len(text) <= most else f"{text[:most]}… ({len(text) - most} characters more)"


def differences(before: RunFacts, after: RunFacts) -> list[list[str]]:
    """What two runs do not have in common: names, and the value of either; a dash for none.

    Settings that only one of them has, such as those of another verb, are left out.
    """
    first, second = dict(provenance_rows(before)), dict(provenance_rows(after))
    found = []
    for name in dict.fromkeys((*first, *second)):
        is_of_one = name.startswith("settings.") and not (name in first and name in second)
        if name not in _ALWAYS_OTHERS and not is_of_one and first.get(name) != second.get(name):
            found.append([name, first.get(name, "-"), second.get(name, "-")])
    return found


def reproduce(answer: TracedAnswer) -> str | None:
    """The command that gives this answer again, steps and details with it.

    Returns:
        None where the trace does not say enough: no run, or a prompt that is not one question.
    """
    settings = (answer.run or {}).get("settings")
    prompt = answer.prompt
    if not isinstance(settings, Mapping) or prompt is None or prompt.text is None or len(prompt.text) > _MOST_TEXT:
        return None
    model, drafter = settings.get("model"), settings.get("draft_model")
    if not isinstance(model, str):
        return None
    words = ["paceline", "generate", model]
    if isinstance(drafter, str) and not answer.is_plain:
        words += ["--draft-model", drafter]
    words += ["--prompt", prompt.text]
    if prompt.seed is not None:
        words += ["--seed", str(prompt.seed)]
    biases = settings.get("logit_bias")
    if isinstance(biases, Mapping):
        words += [word for token, bias in biases.items() for word in ("--logit-bias", f"{token}={bias}")]
    fields = GenerateRun.model_fields
    for key, value in settings.items():
        if key in _NOT_OF_ONE_ANSWER or key not in fields or value is None or isinstance(value, Mapping):
            continue
        if json.dumps(value) != json.dumps(fields[key].default):  # a tuple is a list in a file
            words += ["--set", f"{key}={json.dumps(value, ensure_ascii=False)}"]
    if not answer.is_plain:
        words += ["--trace-file", "one.jsonl", "--trace-details"]
    return shlex.join(words)
