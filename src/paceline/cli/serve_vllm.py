"""`paceline serve MODEL --draft-model DRAFTER --engine vllm`: vLLM serves the pair, once the drafter is known to fit.

vLLM reads drafters leniently, so whatever it would refuse late or misread is refused here, from configs and headers
alone. The process then becomes vLLM's: what follows `--` goes to it as it stands.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from paceline.errors import CompatibilityError, ConfigError

if TYPE_CHECKING:
    from paceline.checkpoint.contract import DrafterContract
    from paceline.configuration.serving import ServeRun

_OBEYED = (
    *("model", "draft_model", "spec_tokens", "max_model_len", "dtype", "offline", "engine", "engine_command"),
    *("host", "port", "served_model_name", "api_keys", "allowed_origins", "max_num_seqs", "prefix_cache"),
    *("per_request_spec_decode_metrics", "generation_config"),
)


def serve_by_vllm(run: ServeRun, arguments: Sequence[str], *, dry_run: bool, as_json: bool) -> None:
    """Check the pair and become `vllm serve`.

    Args:
        run: settings.
        arguments: further ones for vLLM.
        dry_run: show its command, and do not run it.
        as_json: how it is shown.
    Raises:
        ConfigError: a setting is not vLLM's, or it is not installed.
        CompatibilityError: the drafter does not fit the target, or vLLM would not serve it as it was trained.
    """
    from paceline.configuration.environment import all_variables

    variables = all_variables()
    refuse_what_vllm_does_not_obey(run)
    command = command_of(run, checked_drafter(run, variables), arguments)
    environment = variables_of(run, variables)
    if dry_run:
        _show(["(set)" if word in run.api_keys else word for word in command], as_json=as_json)
        return
    program = shutil.which(command[0])
    if program is None:
        raise ConfigError(
            f"there is no program {command[0]!r} here",
            hint="vLLM in an environment of its own, and --engine-command PATH to its `vllm`",
        )
    from paceline.log import get_logger

    get_logger(__name__).info(
        "vLLM serves from here on, without canary and fingerprint: `paceline check` of the drafter does what they do"
    )
    os.execve(program, command, environment)


def refuse_what_vllm_does_not_obey(run: ServeRun) -> None:
    """A setting that would change nothing is a mistake.

    Raises:
        ConfigError: names all of them.
    """
    ignored = [
        name
        for name, field in type(run).model_fields.items()
        if name not in _OBEYED and getattr(run, name) != field.get_default(call_default_factory=True)
    ]
    if ignored:
        raise ConfigError(
            f"vLLM is not told {', '.join(ignored)}", hint="flags of its own behind --, or --engine paceline"
        )


def checked_drafter(run: ServeRun, environment: Mapping[str, str]) -> DrafterContract | None:
    """The drafter's contract, complete and known to fit; None where nothing is drafted.

    Raises:
        CheckpointError: a config cannot be found or read.
        CompatibilityError: as `serve_by_vllm`.
        ConfigError: the target is in a file that vLLM is not given.
    """
    from paceline.checkpoint.compatibility import check_fit, complete_contract
    from paceline.checkpoint.dialects import read_drafter
    from paceline.checkpoint.locate import locate_drafter, locate_target
    from paceline.checkpoint.target_config import read_target_contract
    from paceline.checkpoint.vllm_support import obstacles_for_vllm

    path = locate_target(run.model, offline=run.offline)
    if not path.is_dir():
        raise ConfigError(
            f"vLLM is given folders and hub names; {run.model} is the file {path.name}", hint="the target's own folder"
        )
    if run.draft_model is None:
        return None
    files = read_drafter(locate_drafter(run.draft_model, offline=run.offline))
    target = read_target_contract(path, run.model)
    contract = complete_contract(files.contract, target)
    check_fit(contract, target, num_draft_tokens=run.spec_tokens)
    found = obstacles_for_vllm(contract, files.dialect, files.folder, environment)
    if found:
        raise CompatibilityError(
            "vLLM does not serve this drafter as it was trained: " + "; ".join(found),
            origin={"drafter": files.folder},
            hint="--engine paceline, which does",
        )
    return contract


def command_of(run: ServeRun, drafter: DrafterContract | None, arguments: Sequence[str]) -> list[str]:
    """vLLM's command; keys of clients are in it only where there are several."""
    from paceline.checkpoint.vllm_support import METHODS

    model, revision = _name_and_revision(run.model)
    command = [run.engine_command, "serve", model, "--host", run.host, "--port", str(run.port)]
    if revision is not None:
        command += ["--revision", revision]
    if drafter is not None:
        assert run.draft_model is not None
        model, revision = _name_and_revision(run.draft_model)
        speculative = {
            "method": METHODS[drafter.family],
            "model": model,
            **({} if revision is None else {"revision": revision}),
            "num_speculative_tokens": run.spec_tokens or drafter.num_draft_tokens,
        }
        command += ["--speculative-config", json.dumps(speculative)]
    if run.served_model_name is not None:
        command += ["--served-model-name", run.served_model_name]
    if len(run.api_keys) > 1:
        command += ["--api-key", *run.api_keys]
    if run.allowed_origins:
        command += ["--allowed-origins", json.dumps(run.allowed_origins)]
    if run.max_model_len is not None:
        command += ["--max-model-len", str(run.max_model_len)]
    if run.dtype != "auto":
        command += ["--dtype", run.dtype]
    if run.max_num_seqs != type(run).model_fields["max_num_seqs"].default:
        command += ["--max-num-seqs", str(run.max_num_seqs)]
    if not run.prefix_cache:
        command.append("--no-enable-prefix-caching")
    if run.per_request_spec_decode_metrics != "none":
        command += ["--per-request-spec-decode-metrics", run.per_request_spec_decode_metrics]
    if run.generation_config == "none":
        command += ["--generation-config", "vllm"]
    return [*command, *arguments]


def _name_and_revision(name: str) -> tuple[str, str | None]:
    """A model as vLLM takes it, which knows no `~`, no config.json in the place of its folder and no `@REVISION`."""
    from paceline.checkpoint.hub import parse_hub_name

    path = Path(name).expanduser()
    if path.exists():
        return str(path.parent if path.is_file() else path), None
    hub_name = parse_hub_name(name)
    return (name, None) if hub_name is None else (hub_name.repository, hub_name.revision)


def variables_of(run: ServeRun, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment that vLLM gets: a lone key is in there, where no other user can read it."""
    variables = dict(environment)
    if len(run.api_keys) == 1:
        variables["VLLM_API_KEY"] = run.api_keys[0]
    if run.offline:
        variables["HF_HUB_OFFLINE"] = "1"
    return variables


def _show(command: Sequence[str], *, as_json: bool) -> None:
    from paceline.cli import options

    if as_json:
        options.print_json({"command": list(command)})
    else:
        typer.echo(shlex.join(command))
