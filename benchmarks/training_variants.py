"""Trains variants of one run for the same number of seconds each and prints their held-out acceptance side by side.

    python -m benchmarks.training_variants examples/train_smollm2_dflash.toml --seconds 90 --out runs/variants \
        "objective.loss=kl" "objective.loss=ce"

Each quoted argument is one variant: overrides separated by blanks. The number of steps follows from a short timing of
the variant itself, so every variant decays its learning rate within its own time.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import time
from pathlib import Path
from typing import Any

from paceline.configuration.load import load_settings
from paceline.configuration.run import TrainRun
from paceline.models.loading import load_target
from paceline.training.loop import train

_TIMED_STEPS = 60  # the last 20 are timed; compilation is over by then


def main() -> None:
    """Time, train and tabulate every variant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", type=Path)
    parser.add_argument("variants", nargs="+")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)8.0f ms %(message)s")
    target = None
    for number, variant in enumerate(arguments.variants):
        output = arguments.out / f"variant-{number}"
        base = [*variant.split(), f"output={output}"]

        def settings(*more: str, base: list[str] = base) -> TrainRun:
            return load_settings(TrainRun, arguments.settings, [*base, *more])

        timing = settings(
            f"schedule.num_steps={_TIMED_STEPS}", "evaluate.num_conversations=0", f"output={output}-timing"
        )
        if target is None:
            asked = timing.target
            target = load_target(asked.name, dtype=asked.dtype, device=timing.device, linear_mode="plain")
        shutil.rmtree(timing.output, ignore_errors=True)
        train(timing, target)
        row = _rows(timing.output)[-2]  # the last row is the evaluation
        num_steps = max(20, int(arguments.seconds / row["seconds"] * row["num_steps"]))
        shutil.rmtree(timing.output, ignore_errors=True)
        shutil.rmtree(output, ignore_errors=True)
        began = time.perf_counter()
        outcome = train(settings(f"schedule.num_steps={num_steps}", f"evaluate.every={num_steps}"), target)
        seconds = time.perf_counter() - began
        last = _rows(output)[-1]
        lengths = {name: round(row["acceptance_length"], 3) for name, row in last.items() if isinstance(row, dict)}
        print(
            json.dumps(
                {
                    "variant": variant,
                    "steps": outcome.step,
                    "conversations": outcome.step * timing.schedule.batch_size * timing.schedule.accumulation,
                    "seconds": round(seconds, 1),
                    "tokens_per_second": round(row["tokens_per_second"]),
                    "acceptance_length": lengths,
                }
            ),
            flush=True,
        )


def _rows(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


if __name__ == "__main__":
    main()
