"""`torchrun --nproc-per-node 4 -m paceline generate TARGET --tp 2 --pp 2 ...`: a target over several processes.

All prompts are answered side by side and written when they are done, by the first process alone. Drafts are judged by
equality with the target's own choice, so that the text of a seed is that of plain decoding.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer

from paceline.cli import options
from paceline.errors import EXIT_FAILED, ConfigError

if TYPE_CHECKING:
    from paceline.checkpoint.tokenizer import TextTokenizer
    from paceline.configuration.environment import Environment
    from paceline.configuration.generation import GenerateRun
    from paceline.distributed.opening import DecodeSettings
    from paceline.distributed.places import DecodeRequest, DecodeResult
    from paceline.distributed.world import World
    from paceline.evaluation.prompts import Prompt

_MOST_PLACES = 8  # requests at the same time
_OBEYED = (
    *("model", "draft_model", "spec_tokens", "max_model_len", "dtype", "device", "linear_mode", "threads", "offline"),
    *("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "n", "ignore_eos", "stop_token_ids"),
    *("system", "raw"),
    *("tensor_parallel_size", "pipeline_parallel_size", "pipeline_cuts"),
)


def generate_over_ranks(
    run: GenerateRun,
    prompts: Sequence[Prompt],
    environment: Environment,
    session: options.Session,
    *,
    as_json: bool,
) -> None:
    """Answer prompts in as many processes as torchrun started; the first one alone talks.

    Args:
        run: settings.
        prompts: to be answered.
        environment: may name another stream for the drafter.
        session: how to talk.
        as_json: one JSON object in place of texts.
    Raises:
        ConfigError: a setting is not obeyed here, or torchrun started another number of processes.
        PacelineError: on the rank where it happened; models cannot be found, cut or combined.
    """
    refuse_what_is_not_obeyed(run)
    from paceline.distributed.opening import open_target
    from paceline.distributed.world import DisagreementError, OtherRankFailedError, join_world
    from paceline.log import configure_logging

    options.set_threads(run.threads, environment)
    rank = 0
    try:
        with join_world(run.device) as world:
            rank = world.rank
            if rank:
                configure_logging(verbosity=-1, color=session.color, rank=rank)
            tokenizer, encoded = world.together(lambda: _encode(run, prompts))
            opened = open_target(world, _settings(run, environment, encoded))
            first_seed = world.given_by(0, run.seed if run.seed is not None else secrets.randbits(31))
            requests = _requests(run, encoded, first_seed)
            results = opened.decoder.generate(requests)
            opened.close()
    except OtherRankFailedError as error:  # that rank has said what it was
        raise typer.Exit(error.exit_code) from error
    except DisagreementError as error:
        if rank:
            raise typer.Exit(error.exit_code) from error
        raise
    if rank:
        return
    _show(run, world, prompts, requests, results, tokenizer, as_json=as_json)
    if any(result.finish_reason == "error" for result in results):
        raise typer.Exit(EXIT_FAILED)


def refuse_what_is_not_obeyed(run: GenerateRun) -> None:
    """A setting that would change nothing is a mistake.

    Raises:
        ConfigError: names all of them.
    """
    kind = type(run)
    ignored = [
        name
        for name, field in kind.model_fields.items()
        if name not in _OBEYED and getattr(run, name) != field.get_default(call_default_factory=True)
    ]
    if run.verify_method == "coupled":  # which is how drafts are judged here
        ignored.remove("verify_method")
    if ignored:
        raise ConfigError(
            f"over several processes {', '.join(ignored)} {'is' if len(ignored) == 1 else 'are'} not obeyed",
            hint="temperature, top-k, top-p, min-p and seed choose tokens there; in one process the others work, too",
        )


def _encode(run: GenerateRun, prompts: Sequence[Prompt]) -> tuple[TextTokenizer, list[list[int]]]:
    from paceline.checkpoint.locate import locate_target
    from paceline.checkpoint.tokenizer import open_tokenizer
    from paceline.evaluation.prompts import encode_prompt

    tokenizer = open_tokenizer(locate_target(run.model, offline=run.offline))
    return tokenizer, [encode_prompt(prompt, tokenizer, system=run.system, raw=run.raw) for prompt in prompts]


def _settings(run: GenerateRun, environment: Environment, encoded: Sequence[Sequence[int]]) -> DecodeSettings:
    from paceline.distributed.opening import DecodeSettings

    return DecodeSettings(
        run.model,
        run.draft_model,
        num_stages=run.pipeline_parallel_size,
        borders=run.pipeline_cuts or None,
        tensor_size=run.tensor_parallel_size,
        dtype=run.dtype,
        linear_mode=run.linear_mode,
        num_draft_tokens=run.spec_tokens,
        aux_hidden_stream=environment.aux_hidden_stream,
        num_places=min(len(encoded) * run.n, _MOST_PLACES),
        max_model_len=run.max_model_len or max(map(len, encoded)) + run.max_tokens,
        offline=run.offline,
    )


def _requests(run: GenerateRun, encoded: Sequence[Sequence[int]], first_seed: int) -> list[DecodeRequest]:
    from paceline.distributed.places import DecodeRequest

    jobs = [ids for ids in encoded for _ in range(run.n)]
    return [
        DecodeRequest(
            tuple(ids),
            max_tokens=run.max_tokens,
            temperature=run.temperature,
            top_k=run.top_k,
            top_p=run.top_p,
            min_p=run.min_p,
            stop_token_ids=frozenset(run.stop_token_ids),
            seed=(first_seed + index) % 2**63,
            ignore_eos=run.ignore_eos,
        )
        for index, ids in enumerate(jobs)
    ]


def _show(
    run: GenerateRun,
    world: World,
    prompts: Sequence[Prompt],
    requests: Sequence[DecodeRequest],
    results: Sequence[DecodeResult],
    tokenizer: TextTokenizer,
    *,
    as_json: bool,
) -> None:
    from paceline.trace.acceptance import AcceptanceSummary

    rows: list[dict[str, Any]] = []
    for index, (request, result) in enumerate(zip(requests, results, strict=True)):
        prompt, text = prompts[index // run.n], tokenizer.decode(result.token_ids)
        rows.append(
            {
                "id": prompt.id,
                "sample_index": index % run.n,
                "num_prompt_tokens": len(request.prompt_ids),
                "seed": request.seed,
                "text": text,
                "token_ids": list(result.token_ids),
                "finish_reason": result.finish_reason,
                "num_passes": len(result.steps),
            }
        )
        if run.draft_model is not None:
            rows[-1]["speculative_decoding"] = result.acceptance.to_dict()
        if not as_json:
            if len(results) > 1:
                typer.echo(f"{chr(10) if index else ''}--- {prompt.id}", err=True)
            typer.echo(text)
    if as_json:
        options.print_json({"settings": run.model_dump(mode="json"), "num_processes": world.size, "results": rows})
        return
    acceptance = AcceptanceSummary.from_counts(step for result in results for step in result.steps)
    if acceptance.num_steps:
        typer.echo(f"acceptance length {acceptance.acceptance_length:.2f} over {acceptance.num_steps} steps", err=True)
