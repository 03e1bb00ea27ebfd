"""`paceline capture features RUN.toml OUT key=value ...`: the target's states for a training run, on disk."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import options

if TYPE_CHECKING:
    import torch

    from paceline.capture.feature_plan import CaptureSettings
    from paceline.capture.feature_record import Texts
    from paceline.capture.features import FeatureCapture
    from paceline.checkpoint.contract import AuxHiddenStream, TargetContract
    from paceline.checkpoint.tokenizer import TextTokenizer
    from paceline.configuration.run import TrainRun

_MIB = 2**20
_SHARE_OF_PEAK = 0.4  # of a bare matrix product's speed, in a pass of the whole target
_WRITTEN_PER_SECOND = 500 * 10**6  # bytes, on a disk of middling speed
_REPORT_EVERY_S = 10.0


def features(
    context: typer.Context,
    config: Annotated[Path, typer.Argument(metavar="RUN", help="Settings of the training run, TOML or YAML.")],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="Folder of the features; `data.features` of the run.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE...", help="Changes to the settings.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes; more than one need the ray extra.")] = 1,
    shard_mib: Annotated[float, typer.Option(min=0.001, help="Size of a shard in MiB, more or less.")] = 256.0,
    set_values: options.SetValues = None,
    offline: options.Offline = False,
    threads: options.Threads = None,
    as_json: options.Json = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Show settings and an estimate of disk and time; write nothing.",
            rich_help_panel=options.SETTINGS,
        ),
    ] = False,
    no_color: options.NoColor = False,
    debug: options.Debug = False,
    verbose: options.Verbose = 0,
    quiet: options.Quiet = 0,
) -> None:
    """Store the target's states for a run's conversations, so that many epochs need not compute them again.

    A capture that was stopped, in whatever way, goes on with the same command.
    """
    _, environment = options.begin(context, debug=debug, no_color=no_color, verbose=verbose, quiet=quiet)
    from paceline.configuration.load import load_settings
    from paceline.configuration.run import TrainRun
    from paceline.log import get_logger

    run = load_settings(TrainRun, config, [*(overrides or ()), *(set_values or ())])
    options.set_threads(threads, environment)
    stream = environment.aux_hidden_stream
    if stream not in (None, run.drafter.aux_hidden_stream):
        get_logger(__name__).warning(
            "PACELINE_AUX_HIDDEN_STREAM: features of the stream %r are stored; the run's drafter reads %r",
            stream,
            run.drafter.aux_hidden_stream,
        )
    job = FeatureJob(run, output.absolute(), offline, round(shard_mib * _MIB), str(Path.cwd()), stream)
    estimate = estimate_features(job)
    if dry_run:
        options.show_settings(run, as_json=as_json, extra=estimate)
        return
    summary = _capture(job, workers, estimate)
    if as_json:
        options.print_json({"features": str(output), **estimate, **summary})
    else:
        typer.echo(output)


@dataclass(frozen=True)
class FeatureJob:
    """A capture as a process of its own is given it.

    Attributes:
        run: the training run's settings.
        folder: to write to, absolute.
        offline: never touch the network.
        shard_bytes: of a shard.
        working_folder: what the paths of the settings are relative to.
        stream: to store in place of the run's own, to compare the two; None is the run's.
    """

    run: TrainRun
    folder: Path
    offline: bool
    shard_bytes: int
    working_folder: str
    stream: AuxHiddenStream | None = None

    def open(self) -> Callable[[int], object]:
        """Load the target and the data; returns what writes a shard."""
        os.chdir(self.working_folder)
        capture = load_capture(self)
        shards = capture.open(self.folder)
        return lambda index: capture.write(shards, index)


def read_texts(run: TrainRun, contract: TargetContract, tokenizer: TextTokenizer) -> list[Texts]:
    """All conversations of a run, file by file, those held out included.

    Raises:
        DataError: names the file and what is wrong with it.
    """
    from paceline.training.chats import chat_encoder
    from paceline.training.data import read_conversations
    from paceline.training.feature_source import texts_of

    encoder = chat_encoder(tokenizer, run.data)
    files = [read_conversations(path, vocab_size=contract.vocab_size, encoder=encoder) for path in run.data.files]
    return [texts_of(conversations, run.data.max_length) for conversations in files]


def load_capture(job: FeatureJob) -> FeatureCapture:
    """The target, its texts and their record, ready to compute.

    Raises:
        PacelineError: the target or the data cannot be read, or the settings do not fit the target.
    """
    from paceline.capture.feature_record import feature_record
    from paceline.capture.features import FeatureCapture
    from paceline.models.loading import load_target

    run = job.run
    target = load_target(
        run.target.name,
        dtype=run.target.dtype,
        device=run.device,
        linear_mode=run.target.linear_mode,
        takes_codes=False,
        offline=job.offline,
    )
    texts = read_texts(run, target.contract, target.tokenizer)
    settings = capture_settings(job, target.contract)
    record = feature_record(
        target,
        texts,
        layer_ids=settings.layer_ids,
        stream=settings.stream,
        keeps_hidden=settings.keeps_hidden,
        max_length=run.data.max_length,
        mask_token_id=run.drafter.mask_token_id,
        files=[_described(path, part) for path, part in zip(run.data.files, texts, strict=True)],
        sampling=_sampling(run),
    )
    return FeatureCapture(target, _joined(texts), settings, record)


def capture_settings(job: FeatureJob, contract: TargetContract) -> CaptureSettings:
    """What the drafter of the run will read.

    Raises:
        ConfigError: the settings do not fit the target.
    """
    from paceline.capture.feature_plan import CaptureSettings
    from paceline.errors import ConfigError
    from paceline.training.contract import drafter_contract
    from paceline.training.feature_source import needs_last_hidden

    if job.stream is not None and job.stream not in contract.aux_hidden_streams:
        raise ConfigError(
            f"features of the stream {job.stream!r} shall be stored; the target has "
            f"{' and '.join(sorted(contract.aux_hidden_streams))}",
            origin={"PACELINE_AUX_HIDDEN_STREAM": "environment", "target": contract.origin},
            hint="unset PACELINE_AUX_HIDDEN_STREAM",
        )
    drafter = drafter_contract(job.run, contract)
    return CaptureSettings(
        layer_ids=drafter.target_layer_ids,
        stream=job.stream or drafter.aux_hidden_stream,
        keeps_hidden=needs_last_hidden(job.run),
        shard_bytes=job.shard_bytes,
    )


def estimate_features(job: FeatureJob) -> dict[str, object]:
    """Size and time of a capture, before a weight is loaded or a byte written.

    Raises:
        PacelineError: the target or the data cannot be read, or the settings do not fit the target.
        CapacityError: the disk cannot hold it; says both numbers.
    """
    from paceline.capture.feature_plan import bytes_per_token, require_disk, shard_borders, shard_bytes
    from paceline.checkpoint.locate import locate_target
    from paceline.checkpoint.target_config import read_target_contract
    from paceline.checkpoint.tokenizer import open_tokenizer
    from paceline.cli.estimate import num_active_parameters
    from paceline.models.loading import resolve_device, resolve_dtype

    run = job.run
    path = locate_target(run.target.name, offline=job.offline)
    contract = read_target_contract(path, run.target.name)
    settings = capture_settings(job, contract)
    texts = _joined(read_texts(run, contract, open_tokenizer(path)))
    device = resolve_device(run.device)
    dtype = resolve_dtype(run.target.dtype, device)
    per_token = bytes_per_token(
        contract.hidden_size, len(settings.layer_ids), dtype.itemsize, keeps_hidden=settings.keeps_hidden
    )
    num_tokens = len(texts.tokens)
    num_shards = len(shard_borders(texts.lengths, per_token, settings.shard_bytes)) - 1
    num_bytes = shard_bytes(num_tokens, len(texts), per_token, num_shards)
    there = sum(file.stat().st_size for file in job.folder.glob("shard-*")) if job.folder.is_dir() else 0
    require_disk(job.folder, max(0, num_bytes - there))
    body = num_active_parameters(contract) - contract.vocab_size * contract.hidden_size
    computing = 2 * body * num_tokens / (_product_speed(device, dtype) * _SHARE_OF_PEAK)
    return {
        "num_conversations": len(texts),
        "num_tokens": num_tokens,
        "bytes_per_token": per_token,
        "num_shards": num_shards,
        "disk_bytes": num_bytes,
        "disk_gib": round(num_bytes / 2**30, 3),
        "time_minutes": round(max(computing, num_bytes / _WRITTEN_PER_SECOND) / 60, 1),
    }


def _product_speed(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of a matrix product in the target's precision, here and now: the best of a few."""
    import torch

    size = 4096 if device.type == "cuda" else 768
    left = torch.ones((size, size), dtype=dtype, device=device)
    seconds = []
    for _ in range(5):  # the first pays for set-up
        began = time.perf_counter()
        (left @ left).sum().item()  # reading the sum waits for the device
        seconds.append(time.perf_counter() - began)
    return 2 * size**3 / min(seconds)


def _capture(job: FeatureJob, workers: int, estimate: Mapping[str, object]) -> dict[str, object]:
    from paceline.capture.fan_out import FanOutSettings, fan_out, require_ray
    from paceline.capture.features import finish_capture
    from paceline.log import get_logger

    log = get_logger(__name__)
    log.info(
        "%s GiB in %s shards, about %s minutes", *(estimate[k] for k in ("disk_gib", "num_shards", "time_minutes"))
    )
    if workers > 1:
        require_ray()  # before a minute of loading
    capture = load_capture(job)
    shards = capture.open(job.folder)
    missing = shards.missing()
    if len(missing) < shards.num_shards:
        log.info("%d of %d shards are there already", shards.num_shards - len(missing), shards.num_shards)
    report = _reporter(len(missing))
    if workers == 1:
        capture.run(shards, lambda record: report(record.index))
    else:
        import torch

        from paceline.models.loading import resolve_device

        del capture  # the workers have a target each
        is_gpu = resolve_device(job.run.device).type == "cuda"
        if is_gpu:
            torch.cuda.empty_cache()
        settings = FanOutSettings(
            workers, num_gpus_per_worker=1.0 if is_gpu else 0.0, num_threads=torch.get_num_threads()
        )
        fan_out(job, missing, settings, report)
    return finish_capture(shards)


def _reporter(num_shards: int) -> Callable[[int], None]:
    """Logs how far a capture is, now and then."""
    from paceline.log import get_logger

    log, began, state = get_logger(__name__), time.perf_counter(), {"done": 0, "told": 0.0}

    def report(index: int) -> None:
        state["done"] += 1
        elapsed = time.perf_counter() - began
        if elapsed - state["told"] >= _REPORT_EVERY_S or state["done"] == num_shards:
            state["told"] = elapsed
            left = elapsed / state["done"] * (num_shards - state["done"])
            log.info("%d of %d shards written, %.0f s left", state["done"], num_shards, left)

    return report


def _joined(parts: list[Texts]) -> Texts:
    import numpy as np

    from paceline.capture.feature_record import Texts

    lengths = np.concatenate([part.lengths for part in parts])
    return Texts(
        tokens=np.concatenate([part.tokens for part in parts]),
        supervised=np.concatenate([part.supervised for part in parts]),
        starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
    )


def _described(path: Path, texts: Texts) -> dict[str, object]:
    """A data file as the record names it; a folder of captured prompts is known by its manifest."""
    import hashlib

    from paceline.capture.shards import MANIFEST_FILE

    with (path / MANIFEST_FILE if path.is_dir() else path).open("rb") as file:
        return {"name": path.name, "sha256": hashlib.file_digest(file, "sha256").hexdigest(), "rows": len(texts)}


def _sampling(run: TrainRun) -> dict[str, Any] | None:
    """How the answers were drawn, as far as folders of captured prompts say so, by their names."""
    import json

    from paceline.capture.shards import MANIFEST_FILE

    found = {}
    for path in run.data.files:
        if (path / MANIFEST_FILE).is_file():
            plan = json.loads((path / MANIFEST_FILE).read_text(encoding="utf-8")).get("plan", {})
            found[path.name] = plan.get("sampling")
    return found or None
