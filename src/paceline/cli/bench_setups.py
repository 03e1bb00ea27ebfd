"""The set-ups of `paceline bench`: engines over one loaded target, or servers; and what a result says of them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from paceline.errors import RequestError

if TYPE_CHECKING:
    from paceline.benching.engine_setup import EngineSetUp
    from paceline.benching.records import Question, SetUp
    from paceline.benching.server_setup import ServerOptions
    from paceline.configuration.bench import BenchRun
    from paceline.configuration.environment import Environment
    from paceline.engine.request import SamplingParameters
    from paceline.engine.settings import EngineSettings
    from paceline.evaluation.prompts import Prompt
    from paceline.models.loading import LoadedDrafter, LoadedTarget

# A row's bits do not depend on the rows beside it there, so greedy text with drafts is that without.
_KEEPING_MODES = ("row_invariant", "native", "quantized", "int8")
_SLOTS = 16  # of an engine where nothing bounds how many requests come


class OpenSetUps(Protocol):
    """Opens set-ups, and knows what they are."""

    facts: list[dict[str, object]]
    promises_identity: bool

    def opened(self) -> contextlib.AbstractAsyncContextManager[Sequence[SetUp]]: ...


@dataclass
class Engines:
    """Engines of this process.

    Attributes:
        run: settings.
        target: loaded.
        drafters: of each set-up, None for plain decoding.
        prompts: as token ids.
        facts: one table per set-up.
        promises_identity: whether all set-ups have to give the same answers.
    """

    run: BenchRun
    target: LoadedTarget
    drafters: Sequence[LoadedDrafter | None]
    prompts: Sequence[Prompt]
    facts: list[dict[str, object]] = field(default_factory=list)
    promises_identity: bool = False

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[Sequence[SetUp]]:
        """Start all engines; at the end they stop, and at an error at once."""
        async with contextlib.AsyncExitStack() as stack:
            setups = [
                await self._start(name, drafter, stack)
                for name, drafter in zip(self.run.setup_names, self.drafters, strict=True)
            ]
            try:
                yield setups
            finally:
                for facts, setup in zip(self.facts, setups, strict=True):
                    facts["totals"] = await setup.totals()

    async def _start(self, name: str, drafter: LoadedDrafter | None, stack: contextlib.AsyncExitStack) -> EngineSetUp:
        from paceline.benching.engine_setup import EngineSetUp, TimedEngine
        from paceline.engine.async_engine import AsyncEngine

        made: list[TimedEngine] = []

        def make() -> TimedEngine:
            made[:] = [TimedEngine(self.target, drafter, self._settings(drafter))]
            return made[0]

        engine = AsyncEngine(make, canary=self.run.canary, freezes_heap=True)
        await stack.enter_async_context(engine)
        stack.callback(made.clear)
        return EngineSetUp(name, engine, lambda: made[0], self._sampling_of())

    def _settings(self, drafter: LoadedDrafter | None) -> EngineSettings:
        from paceline.engine.settings import EngineSettings

        run, has_drafter = self.run, drafter is not None
        return EngineSettings(
            max_num_seqs=run.max_num_seqs or max(run.concurrency, default=1 if run.request_rate is None else _SLOTS),
            max_model_len=_context_length(run, self.target, self.prompts),
            num_draft_tokens=run.spec_tokens if has_drafter else None,
            draft_sample_method=run.draft_sample_method if has_drafter else None,
            verify_method=run.verify_method if has_drafter else "standard",
            draft_length=run.draft_length if has_drafter else "fixed",
            draft_vocab_size=run.draft_vocab_size,
            prefix_cache=run.prefix_cache,
        )

    def _sampling_of(self) -> _Sampling:
        return _Sampling(self.run)


class _Sampling:
    """Sampling parameters of questions, which differ in their seeds alone."""

    def __init__(self, run: BenchRun) -> None:
        from paceline.cli.running import sampling_of

        self._shared = sampling_of(run)

    def __call__(self, question: Question) -> SamplingParameters:
        return replace(self._shared, seed=question.seed)


def load_engines(run: BenchRun, environment: Environment, prompts: Sequence[Prompt]) -> Engines:
    """Load target and drafters and encode the prompts.

    Args:
        run: settings.
        environment: what the process environment asks for.
        prompts: as they were read.

    Raises:
        PacelineError: a model cannot be found, read or combined, or a prompt cannot be asked.
    """
    from paceline.cli import running
    from paceline.engine.request import check_prompt
    from paceline.evaluation.prompts import Prompt, encode_prompt

    models = running.load_models(run, environment)
    target = models.target
    drafters: list[LoadedDrafter | None] = [None]
    if models.drafter is not None:
        drafters.append(models.drafter)
    if run.other_draft_model is not None:
        drafters.append(running.load_other_drafter(run, run.other_draft_model, target, environment))
    encoded = [
        Prompt(
            id=prompt.id,
            token_ids=tuple(encode_prompt(prompt, target.tokenizer, system=run.system, raw=run.raw)),
            category=prompt.category,
        )
        for prompt in prompts
    ]
    limit = _context_length(run, target, encoded)
    for prompt in encoded:
        try:
            check_prompt(prompt.token_ids or (), vocab_size=target.contract.vocab_size, max_model_len=limit)
        except RequestError as error:
            raise RequestError(f"prompt {prompt.id!r}: {error.message}", hint=error.hint) from error
    return Engines(
        run,
        target,
        drafters,
        encoded,
        facts=[
            _engine_facts(run, name, target, drafter) for name, drafter in zip(run.setup_names, drafters, strict=True)
        ],
        promises_identity=target.linear_mode in _KEEPING_MODES and expects_identity(run),
    )


def expects_identity(run: BenchRun) -> bool:
    """Whether equal answers say something: greedily, and where drafts are judged by equality with a seed."""
    return run.temperature == 0 or (run.seed is not None and run.verify_method in ("match", "coupled"))


@dataclass
class Servers:
    """Servers of the OpenAI API.

    Attributes:
        run: settings.
        api_key: theirs.
        facts: one table per server, once it was found.
        promises_identity: no server promises that its text is another's.
    """

    run: BenchRun
    api_key: str | None
    facts: list[dict[str, object]] = field(default_factory=list)
    promises_identity: bool = False

    @property
    def options(self) -> ServerOptions:
        """How they are asked."""
        from paceline.benching.server_setup import ServerOptions

        run = self.run
        return ServerOptions(
            sampling=sampling_fields(run),
            endpoint=run.endpoint,
            raw=run.raw,
            system=run.system,
            api_key=self.api_key,
            timeout_s=run.request_timeout_s,
        )

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[Sequence[SetUp]]:
        """Find all servers before any of them is measured."""
        from paceline.benching.server_setup import ServerSetUp
        from paceline.configuration.bench import UNKNOWN_MODEL, split_url

        run = self.run
        async with contextlib.AsyncExitStack() as stack:
            setups = []
            for name, url in map(split_url, run.base_urls):
                setup = ServerSetUp(name, url, None if run.model == UNKNOWN_MODEL else run.model, self.options)
                stack.push_async_callback(setup.close)
                self.facts.append({"name": name, **await setup.prepare()})
                setups.append(setup)
            yield setups


def open_servers(run: BenchRun, environment: Environment, prompts: Sequence[Prompt]) -> Servers:
    """What finds the servers; a key that is not among the settings is the environment's.

    Raises:
        RequestError: a prompt cannot be asked in the form that is wanted.
    """
    from paceline.benching.server_setup import prompt_fields

    found = Servers(run, run.api_key or environment.api_key)
    for prompt in prompts:
        prompt_fields(prompt, found.options)
    return found


def sampling_fields(run: BenchRun) -> dict[str, object]:
    """Fields of a request's body. What is not the OpenAI API's own is sent only where it changes something."""
    fields: dict[str, object] = {"max_tokens": run.max_tokens, "temperature": run.temperature}
    neutral = {
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "min_tokens": 0,
        "repetition_penalty": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "ignore_eos": False,
    }
    fields |= {name: getattr(run, name) for name, value in neutral.items() if getattr(run, name) != value}
    return fields | dict(run.extra_body)


def _context_length(run: BenchRun, target: LoadedTarget, prompts: Sequence[Prompt]) -> int:
    from paceline.engine.settings import DEFAULT_MAX_MODEL_LEN

    wanted = max(len(prompt.token_ids or ()) for prompt in prompts) + run.max_tokens
    return run.max_model_len or min(target.contract.max_position_embeddings, max(wanted, DEFAULT_MAX_MODEL_LEN))


def _engine_facts(run: BenchRun, name: str, target: LoadedTarget, drafter: LoadedDrafter | None) -> dict[str, object]:
    weight = target.model.norm.weight
    facts: dict[str, object] = {
        "name": name,
        "target": target.contract.name,
        "linear_mode": target.linear_mode,
        "dtype": str(weight.dtype).removeprefix("torch."),
        "device": str(weight.device),
        "drafter": None,
    }
    if drafter is not None:
        facts["drafter"] = {
            "name": drafter.contract.origin,
            "family": drafter.contract.family,
            "block_size": drafter.contract.block_size,
            "num_draft_tokens": drafter.num_draft_tokens,
            "draft_length": run.draft_length,
            "verify_method": run.verify_method,
        }
    return facts
