"""Where the answers of a trace come from, as rows of a table, and the command that repeats one of them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping

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
            rows.append((prefix, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)))

    walk("", run)
    return rows


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
    for key, value in settings.items():
        if key not in _NOT_OF_ONE_ANSWER and value is not None and not isinstance(value, Mapping):
            words += ["--set", f"{key}={json.dumps(value, ensure_ascii=False)}"]
    if not answer.is_plain:
        words += ["--trace-file", "one.jsonl", "--trace-details"]
    return shlex.join(words)
