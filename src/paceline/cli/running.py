"""From settings to loaded models and an engine; what `generate` and `evaluate` have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.cli.options import set_threads

if TYPE_CHECKING:
    from paceline.configuration.environment import Environment
    from paceline.configuration.run import ModelRun
    from paceline.engine.engine import Engine
    from paceline.engine.request import SamplingParameters
    from paceline.models.loading import LoadedDrafter, LoadedTarget


@dataclass(frozen=True)
class Models:
    """A loaded target and, if one was asked for, its drafter."""

    target: LoadedTarget
    drafter: LoadedDrafter | None


def load_models(run: ModelRun, environment: Environment) -> Models:
    """Load what the settings name and check that the two fit.

    Raises:
        PacelineError: a model cannot be found, read or combined.
    """
    from paceline.errors import ConfigError
    from paceline.log import get_logger
    from paceline.models.loading import load_drafter, load_target

    log = get_logger(__name__)
    set_threads(run.threads, environment)
    log.info("loading target %s", run.model)
    target = load_target(
        run.model, dtype=run.dtype, device=run.device, linear_mode=run.linear_mode, offline=run.offline
    )
    if run.draft_model is None:
        return Models(target, None)
    log.info("loading drafter %s", run.draft_model)
    drafter = load_drafter(run.draft_model, target, num_draft_tokens=run.spec_tokens, offline=run.offline)
    stream = environment.aux_hidden_stream
    if stream is not None and stream != drafter.contract.aux_hidden_stream:
        raise ConfigError(
            f"the drafter was trained on the stream {drafter.contract.aux_hidden_stream!r}, and a dense target has no "
            f"stream {stream!r} to feed it instead",
            origin={"PACELINE_AUX_HIDDEN_STREAM": "environment", "drafter": drafter.contract.origin},
            hint="unset PACELINE_AUX_HIDDEN_STREAM",
        )
    return Models(target, drafter)


def make_engine(
    run: ModelRun,
    models: Models,
    *,
    with_drafter: bool = True,
    max_num_seqs: int = 1,
    num_prompt_tokens: int = 0,
) -> Engine:
    """An engine over loaded models.

    Args:
        run: limits and draft settings.
        models: what `load_models` gave.
        with_drafter: False for plain decoding of the same target.
        max_num_seqs: requests that are decoded at the same time.
        num_prompt_tokens: of the longest prompt; without `max_model_len` the context is long enough for it and its
            answer, as far as the target reaches.
    """
    from paceline.engine.engine import Engine, EngineSettings
    from paceline.engine.settings import DEFAULT_MAX_MODEL_LEN

    drafter = models.drafter if with_drafter else None
    wanted = num_prompt_tokens + run.max_tokens
    limit = models.target.contract.max_position_embeddings
    settings = EngineSettings(
        max_num_seqs=max_num_seqs,
        max_model_len=run.max_model_len or min(limit, max(wanted, DEFAULT_MAX_MODEL_LEN)),
        num_draft_tokens=run.spec_tokens if drafter is not None else None,
        draft_sample_method=run.draft_sample_method if drafter is not None else None,
    )
    return Engine(models.target, drafter, settings)


def sampling_of(
    run: ModelRun, *, stop: tuple[str, ...] = (), stop_token_ids: tuple[int, ...] = ()
) -> SamplingParameters:
    """The sampling parameters that the settings ask for; says once which of them change nothing."""
    from paceline.engine.request import SamplingParameters
    from paceline.log import get_logger

    sampling = SamplingParameters(
        max_tokens=run.max_tokens,
        temperature=run.temperature,
        top_k=run.top_k,
        top_p=run.top_p,
        min_p=run.min_p,
        seed=run.seed,
        stop=stop,
        stop_token_ids=stop_token_ids,
        ignore_eos=run.ignore_eos,
    )
    sampled_only = {
        "top_k": run.top_k != 0,
        "top_p": run.top_p != 1.0,
        "min_p": run.min_p != 0.0,
        "seed": run.seed is not None,
        "draft_sample_method": run.draft_sample_method == "probabilistic",
    }
    idle = [name for name, is_given in sampled_only.items() if is_given]
    if sampling.is_greedy and idle:
        get_logger(__name__).warning("temperature is 0: %s changes nothing", ", ".join(idle))
    return sampling
