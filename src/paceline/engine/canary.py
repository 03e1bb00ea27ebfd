"""The canary: drafts that are known to be right must be accepted in full, and served drafts must equal direct ones.

Verification hides every fault of drafting: the text stays right and only acceptance falls. Three checks find them.

* An oracle replays what plain decoding gave. A refusal means that rows, positions, anchors or commits are wrong.
* What the real drafter drafts while a known text is served is computed once more from the whole text, without any
  cache. A difference means that its context was stale, shifted or incomplete.
* One prompt is served once more from the prefix cache, to two requests at a time, so that blocks are shared and, on a
  CPU, copied. The same comparison then says whether a hit brings the draft context back with the target's keys.

All of it runs on engines of its own, made of the same models and settings but small, in pieces of about a step each.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from paceline.checkpoint.contract import AuxHiddenStream, TargetLayerId
from paceline.engine.cache import KeyValueCache
from paceline.engine.canary_drafts import DraftComparison, ServedBlock, candidates_of, compare_drafts
from paceline.engine.canary_report import CanaryReport
from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.proposal import Proposer, Rows
from paceline.engine.request import RequestResult, SamplingParameters
from paceline.engine.settings import CacheSizes, cache_sizes, context_length
from paceline.engine.slots import SlotState
from paceline.errors import EngineFaultError
from paceline.models.attends import WholeSequence
from paceline.models.drafters.proposal import Proposal
from paceline.models.loading import LoadedDrafter, LoadedTarget
from paceline.models.targets.target import Target
from paceline.ops.sample_tokens import NO_TOKEN

_PROMPT_LENGTHS = (5, 23, 11)  # three for two slots: ragged, and one slot is used again
_NUM_TOKENS = 24
_SAMPLING = SamplingParameters(max_tokens=_NUM_TOKENS, ignore_eos=True, logprobs=0)
_NUM_BLOCKS_HIT = 2  # full blocks of the prompt that is served from the cache
_NUM_SEQS = 2


class ReplayProposer:
    """Proposes the continuation of a known text.

    Args:
        script_of_slot: prompt and output of the request in a slot; None leaves it without drafts.
        num_draft_tokens: K.
    """

    name = "replay"
    num_candidates = 0
    max_positions = 2**31
    target_layer_ids: tuple[TargetLayerId, ...] = ()
    aux_hidden_stream: AuxHiddenStream = "prefix"
    is_capturable = False  # it looks texts up on the host
    is_parallel = True
    cache: KeyValueCache | None = None

    def __init__(self, script_of_slot: Callable[[int], Sequence[int] | None], num_draft_tokens: int) -> None:
        self.script_of_slot = script_of_slot
        self.num_draft_tokens = num_draft_tokens

    def write_context(self, rows: Rows, taps: Sequence[Tensor], positions_BT: Tensor) -> None:
        """A replay needs no context."""

    def settle(self, rows: Rows, token_ids_BT: Tensor, ends_B: Tensor, next_ids_B: Tensor) -> None:
        """Nor does it care what became of its drafts."""

    def propose(self, rows: Rows, state: SlotState, *, all_greedy: bool, num_drafts: int | None = None) -> Proposal:
        """The tokens that follow each anchor in its script, -1 beyond its end."""
        num_drafts = self.num_draft_tokens if num_drafts is None else num_drafts
        lengths: list[int] = state.lengths[rows.slots_B].tolist()
        blocks = []
        for slot, length in zip(rows.slots, lengths, strict=True):
            script = self.script_of_slot(slot) or ()
            known = list(script[length + 1 : length + 1 + num_drafts])
            blocks.append(known + [NO_TOKEN] * (num_drafts - len(known)))
        return Proposal(torch.tensor(blocks, device=state.device))


class SeededReplay:
    """A `ReplayProposer` that asks the host for nothing, so that its steps can be recorded.

    A request says by its seed which text it is; nothing else depends on that, as nothing is sampled.

    Args:
        scripts: prompt and output of the request with seed 0, 1, ...
        num_draft_tokens: K.
        device: of the engine's state.
    """

    name = "replay"
    num_candidates = 0
    max_positions = 2**31
    target_layer_ids: tuple[TargetLayerId, ...] = ()
    aux_hidden_stream: AuxHiddenStream = "prefix"
    is_capturable = True
    is_parallel = True
    cache: KeyValueCache | None = None

    def __init__(self, scripts: Sequence[Sequence[int]], num_draft_tokens: int, device: torch.device) -> None:
        self.num_draft_tokens = num_draft_tokens
        longest = max(len(script) for script in scripts) + num_draft_tokens + 1
        padded = [[*script, *[NO_TOKEN] * (longest - len(script))] for script in scripts]
        self._scripts = torch.tensor(padded, device=device)
        self._offsets_K = torch.arange(1, num_draft_tokens + 1, device=device)

    def write_context(self, rows: Rows, taps: Sequence[Tensor], positions_BT: Tensor) -> None:
        """A replay needs no context."""

    def settle(self, rows: Rows, token_ids_BT: Tensor, ends_B: Tensor, next_ids_B: Tensor) -> None:
        """Nor does it care what became of its drafts."""

    def propose(self, rows: Rows, state: SlotState, *, all_greedy: bool, num_drafts: int | None = None) -> Proposal:
        """The tokens that follow each anchor in its script, -1 beyond its end."""
        offsets_K = self._offsets_K[: self.num_draft_tokens if num_drafts is None else num_drafts]
        scripts_BL = self._scripts[state.sampling_rows(rows.slots_B).seed_B]
        positions_BK = state.lengths[rows.slots_B].unsqueeze(1) + offsets_K
        return Proposal(scripts_BL.gather(1, positions_BK.clamp(max=scripts_BL.shape[1] - 1)))


class WatchedProposer:
    """Keeps a drafter's context as in serving and notes what it drafts, but proposes a known text.

    Of each block the first drafts are right and the next is wrong, a different number each time, so that every count
    of accepted drafts occurs and the context is tried behind all of them.

    Args:
        inner: the drafter as served.
        request_in_slot: whose a slot is.
        scripts: prompt and output of each request.
        vocab_size: wrong drafts stay below it.
    """

    is_capturable = False
    is_parallel = True

    def __init__(
        self,
        inner: Proposer,
        request_in_slot: Callable[[int], str | None],
        scripts: Mapping[str, Sequence[int]],
        vocab_size: int,
    ) -> None:
        self._inner, self._request_in_slot, self._vocab_size = inner, request_in_slot, vocab_size
        self._replay = ReplayProposer(lambda slot: scripts.get(request_in_slot(slot) or ""), inner.num_draft_tokens)
        self.name, self.num_draft_tokens = "watched", inner.num_draft_tokens
        self.num_candidates, self.max_positions = 0, inner.max_positions
        self.target_layer_ids = inner.target_layer_ids
        self.aux_hidden_stream = inner.aux_hidden_stream
        self.noted: list[tuple[str, ServedBlock]] = []  # by request

    @property
    def cache(self) -> KeyValueCache | None:
        """The drafter's."""
        return self._inner.cache

    def write_context(self, rows: Rows, taps: Sequence[Tensor], positions_BT: Tensor) -> None:
        """As served."""
        self._inner.write_context(rows, taps, positions_BT)

    def settle(self, rows: Rows, token_ids_BT: Tensor, ends_B: Tensor, next_ids_B: Tensor) -> None:
        """As served."""
        self._inner.settle(rows, token_ids_BT, ends_B, next_ids_B)

    def propose(self, rows: Rows, state: SlotState, *, all_greedy: bool, num_drafts: int | None = None) -> Proposal:
        """Note the drafter's own block and give a partly wrong one."""
        # Requests of temperature 0 get the best ids either way; drawing them says how likely the others were, too.
        proposal = self._inner.propose(rows, state, all_greedy=False, num_drafts=num_drafts)
        drafted: list[list[int]] = proposal.ids_BK.tolist()
        lengths: list[int] = state.lengths[rows.slots_B].tolist()
        ids_BK = self._replay.propose(rows, state, all_greedy=all_greedy, num_drafts=num_drafts).ids_BK
        slots: list[int] = rows.slots_B.tolist()
        for index, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
            if slot == state.trash_slot:
                continue  # its request has ended, and the host does not know yet
            served = ServedBlock(length, drafted[index], candidates_of(proposal, index))
            self.noted.append((self._request_in_slot(slot) or "", served))
            num_right = length % (ids_BK.shape[1] + 1)
            if num_right < ids_BK.shape[1]:
                ids_BK[index, num_right] = (ids_BK[index, num_right] + 1) % self._vocab_size
        return Proposal(ids_BK)


def run_canary(target: LoadedTarget, drafter: LoadedDrafter | None, settings: EngineSettings) -> CanaryReport:
    """Run all checks on small engines of the same parts.

    Args:
        target: as served.
        drafter: as served; None runs only the oracle.
        settings: of the engine it stands for; slots and context are made small.
    """
    pieces = canary_steps(target, drafter, settings)
    while True:
        try:
            next(pieces)
        except StopIteration as done:
            report: CanaryReport = done.value
            return report


def canary_steps(
    target: LoadedTarget, drafter: LoadedDrafter | None, settings: EngineSettings
) -> Generator[None, None, CanaryReport]:
    """What `run_canary` does in pieces of about a step each, so that others can work in between.

    Yields:
        Nothing, after each piece.
    Returns:
        The report; where an engine found itself wrong, with that alone.
    """
    origin = {"target": target.contract.origin}
    if drafter is not None:
        origin["drafter"] = drafter.contract.origin
    try:
        return (yield from _compared(target, drafter, settings, origin))
    except EngineFaultError as error:
        return CanaryReport(0, 0, (str(error),), 0, 0, 0, origin=origin)


def _compared(
    target: LoadedTarget, drafter: LoadedDrafter | None, settings: EngineSettings, origin: dict[str, str]
) -> Generator[None, None, CanaryReport]:
    K = settings.num_draft_tokens or (drafter.num_draft_tokens if drafter is not None else 7)
    long_prompt = _long_prompt(target, settings) if drafter is not None and settings.prefix_cache else None
    sizes = _PROMPT_LENGTHS if long_prompt is None else (*_PROMPT_LENGTHS, long_prompt)
    small = _small(settings, max_model_len=max(sizes) + _NUM_TOKENS + 1)
    generator = torch.Generator().manual_seed(20)
    prompts = [_prompt(size, target.contract.vocab_size, generator) for size in sizes]
    all_plain = yield from _plain(target, small, prompts)
    plain = all_plain[: len(prompts)]
    refusals, num_near_ties = [], 0
    if len(all_plain) > len(plain):
        refusals += _recorded_differences(all_plain)
    results = yield from _replayed(target, small, plain, K)
    plain_errors: list[float] = []
    errors: list[float] = []
    for right, result in zip(plain * (len(results) // len(plain)), results, strict=True):
        plain_errors += _logprob_errors(target.model, right)
        errors += _logprob_errors(target.model, result)
        refusal, is_near_tie = _first_refusal(target.model, right, result)
        num_near_ties += is_near_tie
        if refusal is not None and not is_near_tie:
            refusals.append(refusal)
        yield
    cold, warm, num_hit_tokens = DraftComparison(), DraftComparison(), None
    if drafter is not None:
        with_drafts = replace(
            small, num_draft_tokens=K, prefix_cache=long_prompt is not None, draft_sample_method="probabilistic"
        )
        if settings.prefix_cache:
            with_drafts = replace(with_drafts, num_blocks=_num_blocks(target, with_drafts, K))
        cold, warm, num_hit_tokens = yield from _watched(target, drafter, with_drafts, plain)
    records = [record for result in results for record in result.trace.records]
    return CanaryReport(
        num_steps=len(records),
        num_drafts=sum(record.num_draft_tokens for record in records),
        refusals=tuple(refusals),
        num_near_ties=num_near_ties,
        num_compared=cold.num_compared,
        num_equal=cold.num_equal,
        num_hit_tokens=num_hit_tokens,
        num_compared_warm=warm.num_compared,
        num_equal_warm=warm.num_equal,
        draft_distance=cold.mean_distance,
        draft_distance_warm=warm.mean_distance,
        logprob_error=sum(errors) / len(errors),
        plain_logprob_error=sum(plain_errors) / len(plain_errors),
        has_16_bits=target.model.norm.weight.dtype.itemsize < 4,
        origin=origin,
    )


def _prompt(size: int, vocab_size: int, generator: torch.Generator) -> list[int]:
    """Random ids whose beginning comes once more: what follows it is in the context, for all who look there."""
    num_repeated = size // 3
    ids: list[int] = torch.randint(vocab_size, (size - num_repeated,), generator=generator).tolist()
    return ids + ids[:num_repeated]


def _small(settings: EngineSettings, *, max_model_len: int) -> EngineSettings:
    """Settings of the canary's engines: two slots, every block in full, and the drafter's own head.

    What is checked is what the drafter was trained for. Nothing is shared with the engine that serves.
    """
    return replace(
        settings,
        max_num_seqs=_NUM_SEQS,
        max_model_len=max_model_len,
        num_draft_tokens=None,
        draft_length="fixed",
        num_drafts_by_batch_size=None,
        draft_vocab_size="full",
        canary="off",
        num_blocks=None,
        prefix_cache=False,
        max_num_waiting=None,
        max_itl_ms=None,
    )


def _long_prompt(target: LoadedTarget, settings: EngineSettings) -> int | None:
    """Tokens of a prompt that fills blocks of the cache and begins one more; None where the target is too short."""
    size = _NUM_BLOCKS_HIT * _sizes(target, replace(settings, num_blocks=None), 1, 0).block_size + 3
    limit = context_length(target, replace(settings, max_model_len=None))
    return size if size + _NUM_TOKENS + 1 <= limit else None


def _num_blocks(target: LoadedTarget, settings: EngineSettings, num_draft_tokens: int) -> int:
    """Room for twice as many contexts as there are slots, so that cached blocks stay and copies have a place."""
    assert settings.max_model_len is not None, "set by `_small`"
    sizes = _sizes(target, settings, settings.max_model_len, num_draft_tokens)
    return 2 * _NUM_SEQS * (sizes.max_blocks + 1) + 1


def _sizes(target: LoadedTarget, settings: EngineSettings, max_model_len: int, num_draft_tokens: int) -> CacheSizes:
    return cache_sizes(
        settings,
        max_model_len=max_model_len,
        num_draft_tokens=num_draft_tokens,
        spare_positions=num_draft_tokens,
        device_type=target.model.norm.weight.device.type,
    )


def _plain(
    target: LoadedTarget, settings: EngineSettings, prompts: Sequence[Sequence[int]]
) -> Generator[None, None, list[RequestResult]]:
    """Plain decoding; twice where steps are recorded."""
    engine = Engine(target, None, settings)
    results: list[RequestResult] = []
    for _ in range(_num_rounds(engine)):
        names = [engine.add_request(prompt, _SAMPLING) for prompt in prompts]
        results += yield from _finished(engine, names, closes=False)
    engine.close()
    return results


def _replayed(
    target: LoadedTarget, settings: EngineSettings, plain: Sequence[RequestResult], num_draft_tokens: int
) -> Generator[None, None, list[RequestResult]]:
    """The same requests with the right drafts; twice where steps are recorded, as the first of each kind is not."""
    scripts = [result.prompt_ids + result.token_ids for result in plain]
    replay = SeededReplay(scripts, num_draft_tokens, target.model.norm.weight.device)
    oracle = Engine(target, None, settings, proposer=replay)
    results: list[RequestResult] = []
    for _ in range(_num_rounds(oracle)):
        names = [
            oracle.add_request(result.prompt_ids, replace(_SAMPLING, seed=seed)) for seed, result in enumerate(plain)
        ]
        while oracle.has_unfinished():
            for delta in oracle.step():
                if delta.step is not None and delta.step.refused_id is not None:
                    oracle.abort(delta.request_id)  # its text has left the script, or is about to
            yield
        results += [oracle.result(name) for name in names]
    oracle.close()
    return results


def _num_rounds(engine: Engine) -> int:
    return 2 if engine.is_recording else 1


def _recorded_differences(results: Sequence[RequestResult]) -> list[str]:
    """Where requests that were run twice got other tokens, or other probabilities of them, from recorded steps."""
    half = len(results) // 2
    found = []
    for index, (first, second) in enumerate(zip(results[:half], results[half:], strict=True)):
        if first.token_ids != second.token_ids:
            found.append(f"recorded steps give prompt {index} another text than the same steps unrecorded")
        elif first.logprobs != second.logprobs:
            found.append(f"recorded steps give the text of prompt {index} other probabilities than unrecorded ones")
    return found


def _watched(
    target: LoadedTarget, drafter: LoadedDrafter, settings: EngineSettings, plain: Sequence[RequestResult]
) -> Generator[None, None, tuple[DraftComparison, DraftComparison, int | None]]:
    """Serve known texts with a watched drafter, and the last of them once more where there is a prefix cache.

    Returns:
        Its drafts beside direct ones, cold and behind the hit, and the size of the hit.
    """
    watched: list[WatchedProposer] = []
    scripts: dict[str, tuple[int, ...]] = {}

    def wrap(inner: Proposer) -> Proposer:
        watched.append(WatchedProposer(inner, engine.request_in_slot, scripts, target.contract.vocab_size))
        return watched[0]

    def add(result: RequestResult) -> str:
        name = engine.add_request(result.prompt_ids, _SAMPLING)
        scripts[name] = result.prompt_ids + result.token_ids
        return name

    engine = Engine(target, drafter, settings)
    engine.wrap_proposer(wrap)
    results = yield from _finished(engine, [add(result) for result in plain], closes=False)
    num_cold = len(results)
    if settings.prefix_cache:
        results += yield from _finished(engine, [add(plain[-1]) for _ in range(_NUM_SEQS)], closes=False)
    engine.close()
    compared = []
    for result in results:
        text = result.prompt_ids + result.token_ids
        # The last step of a request may draft behind the text's end, for nobody.
        blocks = [
            served
            for request_id, served in watched[0].noted
            if request_id == result.request_id and served.position < len(text)
        ]
        compared.append(compare_drafts(target.model, drafter, text, blocks))
        yield
    cold, warm = (sum(some, DraftComparison()) for some in (compared[:num_cold], compared[num_cold:]))
    return cold, warm, min((result.num_cached_tokens for result in results[num_cold:]), default=None)


def _finished(
    engine: Engine, names: Sequence[str], *, closes: bool = True
) -> Generator[None, None, list[RequestResult]]:
    """Run an engine until nothing is left of it to do."""
    while engine.has_unfinished():
        engine.step()
        yield
    results = [engine.result(name) for name in names]
    if closes:
        engine.close()
    return results


@torch.inference_mode()
def _logprob_errors(target: Target, result: RequestResult) -> list[float]:
    """How far the log-probability of each delivered token is from what one pass over the finished text gives."""
    assert result.logprobs is not None, "asked for"
    text = result.prompt_ids + result.token_ids
    ids_1T = torch.tensor([text], device=target.norm.weight.device)
    positions_1T = torch.arange(len(text), device=ids_1T.device).unsqueeze(0)
    first = len(result.prompt_ids)
    logits_TV = target.logits(target(ids_1T, positions_1T, WholeSequence())[0, first - 1 : -1])
    log_p_T = logits_TV.float().log_softmax(-1).gather(1, ids_1T[0, first:].unsqueeze(1)).squeeze(1)
    served_T = torch.tensor([entry.logprob for entry in result.logprobs], device=log_p_T.device)
    errors: list[float] = (log_p_T - served_T).abs().tolist()
    return errors


def _first_refusal(target: Target, right: RequestResult, result: RequestResult) -> tuple[str | None, bool]:
    """The first place where a replay left the plain text, and whether rounding alone explains it."""
    pairs = enumerate(zip(result.token_ids, right.token_ids, strict=False))  # a replay ends at its first refusal
    index = next((index for index, (found, wanted) in pairs if found != wanted), None)
    for record in result.trace.records:
        position = record.anchor_position + record.num_verified_accepted + 1 - len(right.prompt_ids)
        if record.refused_id is not None and (index is None or position < index):
            # Refused, and then chosen all the same: the two were never compared, and rounding has no part in that.
            draft = f"draft {record.num_verified_accepted} of step {record.step_index}"
            return f"{draft} was {record.refused_id}, the plain text, and was refused all the same", False
    if index is None:
        return None, False
    found, wanted = result.token_ids[index], right.token_ids[index]
    known = right.prompt_ids + right.token_ids[:index]
    return f"token {index} is {found}; plain decoding gave {wanted}", _is_near_tie(target, known, found, wanted)


@torch.inference_mode()
def _is_near_tie(target: Target, token_ids: Sequence[int], one: int, other: int) -> bool:
    """Whether two tokens score the same after a text, up to a few units of the logits' last place."""
    ids_1T = torch.tensor([token_ids], device=target.norm.weight.device)
    positions_1T = torch.arange(ids_1T.shape[1], device=ids_1T.device).unsqueeze(0)
    logits = target.logits(target(ids_1T, positions_1T, WholeSequence())[:, -1:]).flatten()
    pair = logits[[one, other]].float()
    num_units = 4 if logits.dtype.itemsize < 4 else 2  # in 16 bits every layer has rounded states, too
    unit = max(torch.finfo(logits.dtype).eps, 1e-5) * float(pair.abs().max())
    return bool((pair[0] - pair[1]).abs() <= num_units * unit)
