"""Plain greedy decoding against `transformers.generate` on the same weights: ids, and logits of one prompt.

    python -m benchmarks.against_transformers --dtype float32 bfloat16 --out docs/results
    python -m benchmarks.against_transformers --set gsm8k=gsm8k.jsonl --set humaneval=humaneval.jsonl --num-prompts 16

Texts may part only at near-ties: both tokens within 4 bf16 units in the last place of the largest logit, by a float32
pass of transformers over the common prefix. Exit code 3 if one parts elsewhere, or if float32 logits of the fixed
prompt differ by more than 1e-4.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.command_line import DTYPES, PROMPTS, make_parser, positive, report, run, say
from benchmarks.lossless import all_logits
from benchmarks.near_ties import Divergence, NextLogits, find_divergence
from benchmarks.prompt_sets import NamedFile, PromptSet, add_set_argument, read_sets
from benchmarks.results import text_table

from paceline.errors import EXIT_CHECK_SAYS_NO, EXIT_DONE

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.models.loading import LoadedTarget

NAME = "parity-transformers"
FIXED_PROMPT = (
    "The quick brown fox jumps over the lazy dog, and 3 + 4 = 7; das weiß doch jeder.\n\ndef f(x):\n    return"
)
LOGIT_TOLERANCE = 1e-4  # in float32


def main(arguments: Sequence[str]) -> int:
    """Compare in every dtype, print the table, say no if something is not rounding."""
    options = parse(arguments)
    import torch

    torch.set_num_threads(options.threads)
    rows = [check_dtype(dtype, options) for dtype in options.dtype]
    print(text_table(rows))
    report(NAME, rows, options, arguments, facts=[f"{options.max_tokens} tokens, concurrency 1"])
    return exit_code(rows)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Options."""
    parser = make_parser(__doc__, has_drafter=False)
    add_set_argument(parser, required=False)
    parser.add_argument("--num-prompts", type=positive, default=32, help=f"of each set; default 32 (of {PROMPTS})")
    parser.add_argument("--max-tokens", type=positive, default=128)
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=["float32"], help="one or both")
    options = parser.parse_args(arguments)
    options.sets = options.sets or [NamedFile("first", PROMPTS)]
    return options


def check_dtype(dtype: str, options: argparse.Namespace) -> dict[str, object]:
    """Load both sides in one dtype and compare them."""
    from benchmarks.transformers_models import load_in_transformers, next_logits

    from paceline.models.loading import DTYPES as TORCH_DTYPES
    from paceline.models.loading import load_target

    say(f"loading {options.model} in {dtype}, here and in transformers")
    target = load_target(options.model, dtype=dtype, device="cpu")
    model = load_in_transformers(options.model, target.contract, TORCH_DTYPES[dtype])
    exact = (
        model if dtype == "float32" else load_in_transformers(options.model, target.contract, TORCH_DTYPES["float32"])
    )
    sets = read_sets(options.sets, target.tokenizer, vocab_size=target.contract.vocab_size, limit=options.num_prompts)
    fixed_ids = target.tokenizer.encode(FIXED_PROMPT)
    difference, largest = logit_difference(all_logits(target, fixed_ids), transformers_logits(model, fixed_ids))
    say(f"logits of the fixed prompt differ by at most {difference:.3g}; the largest is {largest:.3g}")
    found = compare_texts(sets, target, model, options.max_tokens, next_logits(exact))
    return make_row(dtype, found, difference, largest)


def compare_texts(
    sets: Sequence[PromptSet], target: LoadedTarget, model: Any, max_tokens: int, next_logits: NextLogits
) -> list[Divergence | None]:
    """Greedy text of both sides for every prompt, one at a time, and where it parts."""
    from benchmarks.transformers_models import generate_greedily

    from paceline.engine.engine import Engine, EngineSettings
    from paceline.engine.request import SamplingParameters

    engine = Engine(target, None, EngineSettings(max_num_seqs=1))
    sampling = SamplingParameters(max_tokens=max_tokens)
    found: list[Divergence | None] = []
    for prompt_set in sets:
        for index, prompt in enumerate(prompt_set.prompts):
            ours = engine.generate([prompt], sampling)[0].token_ids
            theirs = generate_greedily(model, prompt, max_tokens, target.contract.stop_token_ids).token_ids
            found.append(find_divergence(prompt, ours, theirs, next_logits))
            say(f"{prompt_set.name}: {index + 1} of {len(prompt_set.prompts)}, {found.count(None)} identical so far")
    return found


def transformers_logits(model: Any, ids: Sequence[int]) -> Tensor:
    """Logits of transformers after every token of a sequence, [T, V] in float32."""
    import torch

    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([list(ids)]), use_cache=False).logits[0].float()
    return logits


def logit_difference(ours_TV: Tensor, theirs_TV: Tensor) -> tuple[float, float]:
    """Largest absolute difference, and the largest absolute logit of the reference."""
    return float((ours_TV - theirs_TV).abs().max()), float(theirs_TV.abs().max())


def make_row(dtype: str, found: Sequence[Divergence | None], difference: float, largest: float) -> dict[str, object]:
    """The row of a dtype."""
    divergences = [one for one in found if one is not None]
    return {
        "dtype": dtype,
        "num_prompts": len(found),
        "num_identical": len(found) - len(divergences),
        "num_near_ties": sum(one.is_near_tie for one in divergences),
        "first_divergence_gaps": [one.gap for one in divergences],
        "max_logit_difference": difference,
        "largest_logit": largest,
    }


def exit_code(rows: Sequence[Mapping[str, object]]) -> int:
    """3 if a text parts where there is no near-tie, or float32 logits differ by more than rounding."""
    return EXIT_DONE if all(map(is_sound, rows)) else EXIT_CHECK_SAYS_NO


def is_sound(row: Mapping[str, object]) -> bool:
    """Whether rounding explains every difference of a row."""
    counts = [int(str(row[key])) for key in ("num_prompts", "num_identical", "num_near_ties")]
    is_close = row["dtype"] != "float32" or float(str(row["max_logit_difference"])) <= LOGIT_TOLERANCE
    return counts[0] == counts[1] + counts[2] and is_close


if __name__ == "__main__":
    sys.exit(run(main))
