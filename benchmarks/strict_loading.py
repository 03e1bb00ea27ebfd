"""What strict loading costs: the same pair loaded by a loader that checks nothing, in turns.

    python -m benchmarks.strict_loading --threads 1 --out docs/results

`bare` does what any loader must for the same result: it opens the files, builds both models, copies every tensor to its
place in the dtype asked for, packs, and opens the tokenizer. It is told all sizes and names beforehand and looks at
nothing. `strict` is what a user gets, which reads and checks both configs and every key in them, compares names, shapes
and coverage, looks for NaN and infinity in every tensor, and holds drafter against target; its `loss` is the share by
which it takes longer. The fingerprint, which is replayed on the loaded pair, is timed apart and added for
`loss_with_fingerprint`. These are medians over turns, each of its own turn; `cpu_loss` compares the fastest loads of
either kind in seconds of CPU, which a busy machine lengthens least. Files are in the page cache.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from benchmarks.command_line import DTYPES, make_parser, positive, report, run, say
from benchmarks.peers.folders import export_target
from benchmarks.results import Row, text_table

from paceline.errors import EXIT_DONE, ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.checkpoint.weights import Destination
    from paceline.models.loading import LoadedTarget

NAME = "strict-loading"
TARGET, DRAFTER, BOTH = "target", "drafter", "both"
BARE, STRICT, FINGERPRINT = "bare", "strict", "fingerprint"
Times = tuple[float, float]  # wall and CPU, in seconds


def main(arguments: Sequence[str]) -> int:
    """Load in every dtype and print the table."""
    options = parse(arguments)
    import torch

    torch.set_num_threads(options.threads)
    rows = [row for dtype in options.dtype for row in measure_dtype(dtype, options)]
    print(text_table(rows))
    report(NAME, rows, options, arguments, facts=[f"{options.num_loads} loads each"])
    return EXIT_DONE


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Options."""
    parser = make_parser(__doc__)
    parser.add_argument("--num-loads", type=positive, default=7, help="of each kind; default 7")
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=list(DTYPES), help="one or both; default both")
    return parser.parse_args(arguments)


def measure_dtype(dtype: str, options: argparse.Namespace) -> list[Row]:
    """Rows of one dtype, for the target as it comes and, if that is a GGUF file, as safetensors too."""
    from paceline.checkpoint.locate import locate_drafter, locate_target

    target, drafter = locate_target(options.model), locate_drafter(options.draft_model)
    rows = measure_files(target, drafter, dtype, options)
    if target.suffix == ".gguf":
        with TemporaryDirectory() as root:
            say(f"writing {options.model} as float32 safetensors")
            export_target(options.model, Path(root, "target"))
            rows += measure_files(Path(root, "target"), drafter, dtype, options)
    return rows


def measure_files(target: Path, drafter: Path, dtype: str, options: argparse.Namespace) -> list[Row]:
    """One row for the target's files, one for the drafter's, one for both."""
    from paceline.models.fingerprint import check_fingerprint
    from paceline.models.loading import load_drafter, load_target, read_fingerprint

    storage = "gguf" if target.suffix == ".gguf" else "safetensors"
    say(f"loading {options.model} ({storage}) and {options.draft_model} in {dtype}, {options.num_loads} times")
    loaded = load_target(str(target), dtype=dtype, device="cpu")
    pair = load_drafter(str(drafter), loaded, check_fingerprint=False)

    def replay() -> None:
        stored = read_fingerprint(drafter)
        if stored is None:
            raise ConfigError(f"{drafter} has no fingerprint, whose cost is measured here")
        check_fingerprint(loaded.model, pair.model, stored)

    times = take_turns(
        {
            f"{BARE} {TARGET}": bare_target(target, loaded),
            f"{STRICT} {TARGET}": lambda: load_target(str(target), dtype=dtype, device="cpu"),
            f"{BARE} {DRAFTER}": bare_drafter(drafter, loaded),
            f"{STRICT} {DRAFTER}": lambda: load_drafter(str(drafter), loaded, check_fingerprint=False),
            FINGERPRINT: replay,
        },
        options.num_loads,
    )
    files = {TARGET: weight_files(target), DRAFTER: weight_files(drafter)}
    sizes = {part: sum(file.stat().st_size for file in found) / 1e6 for part, found in files.items()}
    return [{"dtype": dtype, "storage": storage, **row} for row in rows_of(times, sizes)]


def bare_target(path: Path, known: LoadedTarget) -> Callable[[], object]:
    """Loads a dense target without a look at what it loads; `known` gives sizes, names, dtype and arithmetic."""
    from paceline.checkpoint.gguf import open_gguf
    from paceline.checkpoint.names import dense_target_destinations
    from paceline.checkpoint.tokenizer import open_tokenizer
    from paceline.models.building import empty_target
    from paceline.models.layers import set_linear_mode

    weight, destinations = known.model.norm.weight, dense_target_destinations(known.contract)

    def load() -> object:
        model = empty_target(known.contract, weight.dtype, weight.device)
        source = open_gguf(path).load if path.suffix == ".gguf" else read_files(path).__getitem__
        fill(dict(model.named_parameters()), source, destinations)
        set_linear_mode(model, known.linear_mode)
        return model, open_tokenizer(path)

    return load


def bare_drafter(folder: Path, target: LoadedTarget) -> Callable[[], object]:
    """Loads a drafter in its native layout without a look at what it loads."""
    from paceline.checkpoint.compatibility import complete_contract
    from paceline.checkpoint.dialects import read_drafter
    from paceline.checkpoint.names import drafter_destinations
    from paceline.models.building import empty_drafter

    files = read_drafter(folder)
    contract = complete_contract(files.contract, target.contract)
    weight, destinations = target.model.norm.weight, drafter_destinations(contract)

    def load() -> object:
        model = empty_drafter(contract, weight.dtype, weight.device)
        fill(model.checkpoint_parameters(), read_files(folder).__getitem__, destinations)
        model.vocabulary.set_tables(files.draft_to_target, files.mask_embedding)
        model.prepare_for_serving(target.linear_mode)
        return model

    return load


def fill(
    parameters: Mapping[str, Tensor], load: Callable[[str], Tensor], destinations: Mapping[str, Destination]
) -> None:
    """Copy tensors to their places."""
    import torch

    with torch.no_grad():
        for name, place in destinations.items():
            parameter = parameters[place.parameter]
            (parameter if place.rows is None else parameter[slice(*place.rows)]).copy_(load(name))


def read_files(folder: Path) -> dict[str, Tensor]:
    """All tensors of a model folder."""
    from safetensors.torch import load_file

    return {name: tensor for file in weight_files(folder) for name, tensor in load_file(file).items()}


def weight_files(path: Path) -> list[Path]:
    """A .gguf file itself, or the safetensors files that hold the weights of a model folder.

    Raises:
        ConfigError: there are none.
    """
    from paceline.checkpoint.export import FINGERPRINT_FILE, TOKEN_COUNTS_FILE

    if path.suffix == ".gguf":
        return [path]
    others = (FINGERPRINT_FILE, TOKEN_COUNTS_FILE)
    files = sorted(file for file in path.glob("*.safetensors") if file.name not in others)
    if not files:
        raise ConfigError(f"{path} holds no safetensors files to be read")
    return files


def take_turns(actions: Mapping[str, Callable[[], object]], num_loads: int) -> dict[str, list[Times]]:
    """Times of every action in every turn; the order reverses from turn to turn, and the first turn is warm-up.

    Args:
        actions: by name.
        num_loads: turns that count.
    """
    times: dict[str, list[Times]] = {name: [] for name in actions}
    for turn in range(num_loads + 1):
        for name in actions if turn % 2 else reversed(list(actions)):
            gc.collect()  # a load must not pay for freeing the one before
            began = time.perf_counter(), time.process_time()
            actions[name]()
            if turn:
                times[name].append((time.perf_counter() - began[0], time.process_time() - began[1]))
    return times


def rows_of(times: Mapping[str, Sequence[Times]], megabytes: Mapping[str, float]) -> list[Row]:
    """One row per part; the fingerprint belongs to the pair."""
    rows: list[Row] = []
    for part, parts in ((TARGET, [TARGET]), (DRAFTER, [DRAFTER]), (BOTH, [TARGET, DRAFTER])):
        bare, strict = (add(*(times[f"{kind} {one}"] for one in parts)) for kind in (BARE, STRICT))
        row: Row = {
            "part": part,
            "megabytes": sum(megabytes[one] for one in parts),
            "bare_s": statistics.median(wall for wall, _ in bare),
            "strict_s": statistics.median(wall for wall, _ in strict),
            "loss": loss(strict, bare),
            "cpu_loss": cpu_loss(strict, bare),
        }
        if part == BOTH:
            whole = add(strict, times[FINGERPRINT])
            row |= {
                "fingerprint_s": statistics.median(wall for wall, _ in times[FINGERPRINT]),
                "loss_with_fingerprint": loss(whole, bare),
                "cpu_loss_with_fingerprint": cpu_loss(whole, bare),
            }
        rows.append(row)
    return rows


def add(*several: Sequence[Times]) -> list[Times]:
    """Sums turn by turn."""
    return [(sum(wall for wall, _ in turn), sum(cpu for _, cpu in turn)) for turn in zip(*several, strict=True)]


def loss(strict: Sequence[Times], bare: Sequence[Times]) -> float:
    """Median over turns of how much longer the first takes by the wall clock, as a share of the second."""
    return statistics.median(one[0] / other[0] - 1 for one, other in zip(strict, bare, strict=True))


def cpu_loss(strict: Sequence[Times], bare: Sequence[Times]) -> float:
    """The same of the turns that took the fewest seconds of CPU."""
    return min(cpu for _, cpu in strict) / min(cpu for _, cpu in bare) - 1


if __name__ == "__main__":
    sys.exit(run(main))
