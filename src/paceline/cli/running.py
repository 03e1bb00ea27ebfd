"""From settings to loaded models and an engine; what several verbs have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.cli.options import set_threads

if TYPE_CHECKING:
    from paceline.configuration.chat import ChatRun
    from paceline.configuration.environment import Environment
    from paceline.configuration.generation import GenerateRun, ModelRun, ModelSettings
    from paceline.engine.engine import Engine, EngineSettings
    from paceline.engine.request import SamplingParameters
    from paceline.engine.structured import StructuredOutput
    from paceline.models.loading import LoadedDrafter, LoadedTarget


@dataclass(frozen=True)
class Models:
    """A loaded target and, if one was asked for, its drafter."""

    target: LoadedTarget
    drafter: LoadedDrafter | None


def load_models(run: ModelSettings, environment: Environment) -> Models:
    """Load what the settings name and check that the two fit.

    Raises:
        PacelineError: a model cannot be found, read or combined.
    """
    from paceline.log import get_logger
    from paceline.models.loading import load_target

    log = get_logger(__name__)
    set_threads(run.threads, environment)
    log.info("loading target %s", run.model)
    target = load_target(
        run.model, dtype=run.dtype, device=run.device, linear_mode=run.linear_mode, offline=run.offline
    )
    if run.draft_model is None:
        return Models(target, None)
    return Models(target, load_other_drafter(run, run.draft_model, target, environment))


def load_other_drafter(
    run: ModelSettings, draft_model: str, target: LoadedTarget, environment: Environment
) -> LoadedDrafter:
    """Load a drafter for a target that is loaded already, and check that the two fit.

    Args:
        run: the other settings.
        draft_model: drafter folder or hub name.
        target: that it shall draft for.
        environment: what the process environment asks for.

    Raises:
        PacelineError: it cannot be found, read or combined with the target.
    """
    from paceline.errors import ConfigError
    from paceline.log import get_logger
    from paceline.models.loading import load_drafter

    get_logger(__name__).info("loading drafter %s", draft_model)
    stream = environment.aux_hidden_stream
    if stream is not None and stream not in target.contract.aux_hidden_streams:
        raise ConfigError(
            f"the drafter shall be fed the stream {stream!r}; the target has "
            f"{' and '.join(sorted(target.contract.aux_hidden_streams))}",
            origin={"PACELINE_AUX_HIDDEN_STREAM": "environment", "target": target.contract.origin},
            hint="unset PACELINE_AUX_HIDDEN_STREAM",
        )
    return load_drafter(
        draft_model,
        target,
        num_draft_tokens=run.spec_tokens,
        offline=run.offline,
        aux_hidden_stream=stream,
    )


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
    from dataclasses import replace

    from paceline.configuration.generation import TracedRun
    from paceline.engine.engine import Engine
    from paceline.engine.settings import DEFAULT_MAX_MODEL_LEN

    drafter = models.drafter if with_drafter else None
    wanted = num_prompt_tokens + run.max_tokens
    limit = models.target.contract.max_position_embeddings
    settings = replace(
        draft_settings_of(run, drafter),
        max_num_seqs=max_num_seqs,
        max_model_len=run.max_model_len or min(limit, max(wanted, DEFAULT_MAX_MODEL_LEN)),
        trace_details=isinstance(run, TracedRun) and run.trace_details,
    )
    return Engine(models.target, drafter, settings)


def draft_settings_of(run: ModelSettings, drafter: LoadedDrafter | None) -> EngineSettings:
    """How drafts are made and judged, and defaults for the rest; without a drafter, all of it is defaults."""
    from paceline.engine.engine import EngineSettings

    if drafter is None:
        return EngineSettings(draft_vocab_size=run.draft_vocab_size)
    return EngineSettings(
        num_draft_tokens=run.spec_tokens,
        draft_sample_method=run.draft_sample_method,
        verify_method=run.verify_method,
        draft_length=run.draft_length,
        draft_vocab_size=run.draft_vocab_size,
    )


def sampling_of(run: ModelRun) -> SamplingParameters:
    """The sampling parameters that the settings of every run ask for; says once which of them change nothing."""
    from paceline.engine.request import SamplingParameters
    from paceline.log import get_logger

    sampling = SamplingParameters(
        max_tokens=run.max_tokens,
        min_tokens=run.min_tokens,
        temperature=run.temperature,
        top_k=run.top_k,
        top_p=run.top_p,
        min_p=run.min_p,
        seed=run.seed,
        repetition_penalty=run.repetition_penalty,
        frequency_penalty=run.frequency_penalty,
        presence_penalty=run.presence_penalty,
        ignore_eos=run.ignore_eos,
    )
    sampled_only = {
        "top_k": run.top_k != 0,
        "top_p": run.top_p != 1.0,
        "min_p": run.min_p != 0.0,
        "seed": run.seed is not None,
        "draft_sample_method": run.draft_sample_method == "probabilistic",
        "verify_method": run.verify_method != "standard",
    }
    idle = [name for name, is_given in sampled_only.items() if is_given]
    if sampling.is_greedy and idle:
        get_logger(__name__).warning("temperature is 0: %s changes nothing", ", ".join(idle))
    return sampling


def ruled_sampling_of(run: GenerateRun | ChatRun) -> SamplingParameters:
    """What `sampling_of` gives, with stops and rules on tokens.

    Raises:
        RequestError: a value is impossible.
    """
    from dataclasses import replace

    return replace(
        sampling_of(run),
        stop=run.stop,
        stop_token_ids=run.stop_token_ids,
        logit_bias={int(token): bias for token, bias in run.logit_bias.items()} or None,
        allowed_token_ids=run.allowed_token_ids or None,
        bad_words=run.bad_words,
    )


def answer_sampling_of(run: GenerateRun) -> SamplingParameters:
    """What `ruled_sampling_of` gives, with what only single answers have: structure, log-probabilities, samples.

    Raises:
        ConfigError: a file that a setting names cannot be read.
        RequestError: a value is impossible.
    """
    from dataclasses import replace

    return replace(
        ruled_sampling_of(run),
        include_stop_str_in_output=run.include_stop_str_in_output,
        n=run.n,
        logprobs=run.logprobs,
        logprobs_mode=run.logprobs_mode,
        structured_output=_structure_of(run),
    )


def _structure_of(run: GenerateRun) -> StructuredOutput | None:
    from paceline.engine.structured import StructuredOutput

    begins_after = run.structure_begins_after
    if run.json_schema is not None:
        return StructuredOutput("json_schema", _text_or_file("json_schema", run.json_schema), begins_after)
    if run.json_object:
        return StructuredOutput("json_object", "", begins_after)
    if run.regex is not None:
        return StructuredOutput("regex", run.regex, begins_after)
    if run.choice:
        return StructuredOutput("choice", run.choice, begins_after)
    if run.grammar is not None:
        return StructuredOutput("grammar", _text_or_file("grammar", run.grammar), begins_after)
    return None


def _text_or_file(name: str, value: str) -> str:
    """The text itself, or what stands in the file that `@FILE` names."""
    from pathlib import Path

    from paceline.errors import ConfigError

    if not value.startswith("@"):
        return value
    try:
        return Path(value[1:]).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the file of {name} cannot be read: {error}", origin={name: value[1:]}) from error
