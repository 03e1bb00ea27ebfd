"""`paceline check DRAFTER --target TARGET`: is a drafter read as it was trained, stage by stage, and if not, why?"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import options

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.checkpoint.contract import DrafterContract
    from paceline.evaluation.contract_search import Score, Verdict
    from paceline.evaluation.prompts import Prompt
    from paceline.models.loading import LoadedDrafter, LoadedTarget

_NUM_SHOWN = 5  # other readings in the table


@dataclass
class _Answer:
    """What was found, in the order in which it is shown."""

    drafter: str
    target: str
    methods: list[str] = field(default_factory=list)
    stages: list[dict[str, object]] = field(default_factory=list)
    readings: list[dict[str, object]] = field(default_factory=list)
    causes: list[dict[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        return not self.causes

    def says_no(self, stage: str, cause: str, fix: str) -> None:
        self.causes.append({"stage": stage, "cause": cause, "fix": fix})


def check(
    context: typer.Context,
    drafter: Annotated[str, typer.Argument(metavar="DRAFTER", help="Drafter folder or hub name.")],
    target: Annotated[
        str, typer.Option("--target", metavar="MODEL", help="Target: a folder, a .gguf file, a hub name or an alias.")
    ],
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            metavar="FILE",
            help="Also score other readings of the config on these prompts; done with built-in ones where the drafter "
            "has no fingerprint.",
        ),
    ] = None,
    num_prompts: Annotated[
        int | None, typer.Option(min=1, help="Prompts of the file, or of the built-in ones; the first 24 by default.")
    ] = None,
    record: Annotated[
        bool,
        typer.Option(
            "--record",
            help="If the check says yes, write the fingerprint anew from this very target, as training does.",
            rich_help_panel=options.OUTPUT,
        ),
    ] = False,
    dtype: options.Dtype = None,
    device: options.Device = None,
    linear_mode: options.LinearMode = None,
    threads: options.Threads = None,
    offline: options.Offline = False,
    as_json: options.Json = False,
    no_color: options.NoColor = False,
    debug: options.Debug = False,
    verbose: options.Verbose = 0,
    quiet: options.Quiet = 0,
) -> None:
    """Say whether a drafter computes on a target what it was trained to, and name the cause if not (exit code 3)."""
    _, environment = options.begin(context, debug=debug, no_color=no_color, verbose=verbose, quiet=quiet)
    from paceline.checkpoint.locate import locate_drafter
    from paceline.errors import CheckFailedError

    questions = _read_prompts(prompts, num_prompts)
    options.set_threads(threads, environment)
    loaded = _load_target(target, dtype, device, linear_mode, takes_codes=not record, offline=offline)
    folder = locate_drafter(drafter, offline=offline)
    answer = _Answer(drafter, target)
    pair = _load_drafter(folder, loaded, answer)
    if pair is not None:
        stored = _replay(folder, loaded, pair, answer)
        if prompts is not None or (answer.fits and not _covers_all(stored)):
            _score(loaded, pair, questions, answer)
        if record and answer.fits:
            _record(folder, loaded, pair, stored, answer)
    if record and not answer.fits:
        answer.notes.append("nothing was recorded: the check says no")
    if as_json:
        options.print_json({**vars(answer), "fits": answer.fits})
    else:
        _print(answer)
    if not answer.fits:
        first = answer.causes[0]
        raise CheckFailedError(
            "; ".join(cause["cause"] for cause in answer.causes),
            origin={"drafter": folder, "target": loaded.contract.origin},
            hint=first["fix"],
        )


def _read_prompts(path: Path | None, limit: int | None) -> list[Prompt]:
    from paceline.evaluation.own_text import own_questions
    from paceline.evaluation.prompts import read_prompts

    return own_questions()[:limit] if path is None else read_prompts(path, limit=limit if limit is not None else 24)


def _load_target(
    name: str,
    dtype: str | None,
    device: str | None,
    linear_mode: str | None,
    *,
    takes_codes: bool,
    offline: bool,
) -> LoadedTarget:
    from paceline.configuration.generation import ModelRun
    from paceline.configuration.load import load_settings
    from paceline.models.loading import load_target

    values = {"model": name, "dtype": dtype, "device": device, "linear_mode": linear_mode}
    run = load_settings(ModelRun, None, (), {**values, "offline": offline})
    return load_target(
        run.model,
        dtype=run.dtype,
        device=run.device,
        linear_mode=run.linear_mode,
        takes_codes=takes_codes,
        offline=run.offline,
    )


def _load_drafter(folder: Path, target: LoadedTarget, answer: _Answer) -> LoadedDrafter | None:
    """The drafter although a load would refuse it; None, with a cause, where it cannot even be run on this target."""
    from paceline.checkpoint.compatibility import complete_contract, find_misfits
    from paceline.checkpoint.dialects import read_drafter_contract
    from paceline.errors import CompatibilityError, PacelineError
    from paceline.models.capabilities import require_taps
    from paceline.models.loading import load_drafter

    contract = complete_contract(read_drafter_contract(folder), target.contract)
    misfits = find_misfits(contract, target.contract)
    if not misfits:
        try:
            require_taps(target.model, contract.aux_hidden_stream)
        except CompatibilityError as error:
            misfits = [error.message]
    answer.stages.append(_row("contract", not misfits, "; ".join(misfits) or "sizes, taps and vocabulary fit"))
    for misfit in misfits:
        answer.says_no("contract", misfit, f"the target {contract.target_name!r}, which the drafter's config names")
    if not misfits:
        return load_drafter(str(folder), target, check_contract=False, check_fingerprint=False)
    why = "their sizes differ"
    if _has_same_sizes(contract, target):
        try:
            return load_drafter(str(folder), target, check_contract=False, check_fingerprint=False)
        except PacelineError as error:
            why = error.message
    answer.notes.append(f"the drafter cannot be run on this target, so nothing more was compared: {why}")
    return None


def _has_same_sizes(contract: DrafterContract, target: LoadedTarget) -> bool:
    """Whether tensors and taps fit each other; what else disagrees does not keep a drafter from being run."""
    from paceline.checkpoint.compatibility import vocabulary_misfits
    from paceline.checkpoint.contract import capture_id

    borrows = not (contract.has_own_embedding and contract.has_own_head)
    return (
        contract.target_hidden_size == target.contract.hidden_size
        and (not borrows or contract.hidden_size == target.contract.hidden_size)
        and not vocabulary_misfits(contract, target.contract)
        and all(capture_id(layer) in target.model.capture_ids for layer in contract.target_layer_ids)
    )


def _replay(folder: Path, target: LoadedTarget, drafter: LoadedDrafter, answer: _Answer) -> dict[str, Tensor] | None:
    from paceline.models.diagnosis import diagnose, stage_table
    from paceline.models.fingerprint import NEAR_TOLERANCE, is_old, replay_fingerprint
    from paceline.models.loading import read_fingerprint

    stored = read_fingerprint(folder)
    if stored is None:
        answer.notes.append("the drafter has no fingerprint; other readings of its config were scored on prompts")
        return None
    replay = replay_fingerprint(target.model, drafter.model, stored)
    answer.methods.append("fingerprint")
    answer.stages += [_row(title, verdict == "ok", note) for title, verdict, note in stage_table(replay)]
    if replay.failed:
        found = diagnose(target.model, drafter.model, stored, replay)
        # a cause found in the numbers says more than the misfit of the config that it leads to
        answer.causes[:0] = [{"stage": f.stage, "cause": f.cause, "fix": f.fix} for f in found]
    elif max(comparison.error for comparison in replay.taps) > NEAR_TOLERANCE:
        answer.notes.append(
            "the target's states are near those of training, not equal: other weights or a coarser quantisation"
        )
    if is_old(stored):
        answer.notes.append(
            "the fingerprint is of format 1, taps and context features only: RoPE, mask row, windows, layers and heads "
            "are for prompts to judge; --record writes one with every stage if those say yes"
        )
    return stored


def _covers_all(stored: dict[str, Tensor] | None) -> bool:
    """Whether a fingerprint has a witness for every stage, so that prompts need not be asked."""
    from paceline.models.fingerprint import is_old

    return stored is not None and not is_old(stored)


def _score(target: LoadedTarget, drafter: LoadedDrafter, prompts: list[Prompt], answer: _Answer) -> None:
    from paceline.evaluation.contract_search import search_contract
    from paceline.evaluation.own_text import answered

    texts = answered(target, prompts)
    verdict = search_contract(
        target.model, drafter.model, texts, mask_candidates=_mask_candidates(target), on_progress=_show_progress
    )
    answer.methods.append("prompts")
    declared = verdict.declared
    note = f"first drafts accepted {declared.first_accepted:.3f}, {declared.log_likelihood:.3f} nats per token"
    answer.stages.append(_row("drafts on prompts", verdict.says_yes, note))
    shown = [declared, *verdict.others[:_NUM_SHOWN]]
    answer.readings += [_described(score) for score in shown]
    _judge(verdict, answer)


def _show_progress(done: int, number: int) -> None:
    """One line that is redrawn; nothing where nobody watches."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{done} of {number} readings scored" if done < number else "\r\x1b[K")
        sys.stderr.flush()


def _judge(verdict: Verdict, answer: _Answer) -> None:
    declared = verdict.declared
    if verdict.better is not None:
        better = verdict.better
        gain = better.log_likelihood - declared.log_likelihood
        answer.says_no(
            "prompts",
            f"the drafter predicts better with another reading of its config: {better.name} (first drafts accepted "
            f"{better.first_accepted:.3f} instead of {declared.first_accepted:.3f}, {gain:+.2f} nats per token over "
            f"{len(better.log_likelihoods)} prompts, p = {verdict.p_value:.1g} before correction for "
            f"{len(verdict.others)} readings)",
            better.fix,
        )
    elif verdict.is_lost:
        most = max(score.first_accepted for score in verdict.others)
        answer.says_no(
            "prompts",
            "the drafter predicts next to nothing on this target: first drafts accepted "
            f"{declared.first_accepted:.3f}, and at most {most:.3f} with {len(verdict.others)} other readings of its "
            "config",
            "the target that it was trained for; or it is not trained",
        )


def _mask_candidates(target: LoadedTarget) -> list[int]:
    """Ids of tokens whose names say that they could be the mask or the padding."""
    names = ("<mask>", "[MASK]", "<|mask|>", "<|MASK|>", "<pad>", "[PAD]", "<|pad|>", "<|endoftext|>", "<unk>")
    found = [target.tokenizer.token_id(name) for name in names]
    return [token for token in found if token is not None]


def _record(
    folder: Path, target: LoadedTarget, drafter: LoadedDrafter, stored: dict[str, Tensor] | None, answer: _Answer
) -> None:
    """Write the fingerprint anew, and say so in the drafter's provenance."""
    from paceline.evaluation.own_text import answered, own_questions
    from paceline.models.fingerprint import PROBE_TOKENS, record_fingerprint
    from paceline.models.loading import write_fingerprint

    if stored is not None:
        probe = [int(token) for token in stored["probe_ids"]][:PROBE_TOKENS]
    else:
        probe = [token for text in answered(target, own_questions()[:2]) for token in text.ids][:PROBE_TOKENS]
    tensors = record_fingerprint(target.model, drafter.model, probe)
    write_fingerprint(folder, tensors, target)
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    answer.notes.append(f"recorded: {len(probe)} probe tokens, {len(tensors)} tensors, {size // 1024} kB")


def _row(stage: str, is_ok: bool, note: str) -> dict[str, object]:
    return {"stage": stage, "ok": is_ok, "note": note}


def _described(score: Score) -> dict[str, object]:
    return {
        "reading": score.name,
        "first_accepted": score.first_accepted,
        "log_likelihood": score.log_likelihood,
        "num_prompts": len(score.log_likelihoods),
    }


def _print(answer: _Answer) -> None:
    """The stage table on stdout, then what follows from it."""
    width = max(len(str(row["stage"])) for row in answer.stages)
    for row in answer.stages:
        typer.echo(f"{row['stage']:<{width}}  {'ok' if row['ok'] else 'differs':<7}  {row['note']}")
    if answer.readings:
        typer.echo("\nreadings of the config, best first behind the declared one")
        for reading in answer.readings:
            typer.echo(
                f"{reading['first_accepted']:.3f} accepted  {reading['log_likelihood']:8.3f} nats  {reading['reading']}"
            )
    for cause in answer.causes:
        typer.echo(f"\ncause: {cause['cause']}\nfix:   {cause['fix']}")
    for note in answer.notes:
        typer.echo(f"note: {note}")
    typer.echo(f"{answer.drafter} {'fits' if answer.fits else 'does not fit'} {answer.target}")
