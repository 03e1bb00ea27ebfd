"""The canary: drafts that are known to be right must be accepted in full, and served drafts must equal direct ones.

Verification hides every fault of drafting: the text stays right and only acceptance falls. Two checks find them.

* An oracle replays what plain decoding gave. A refusal means that rows, positions, anchors or commits are wrong.
* What the real drafter drafts while a known text is served is computed once more from the whole text, without any
  cache. A difference means that its context was stale, shifted or incomplete.

T tokens of a text, K draft tokens, M key/value heads, H head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.checkpoint.contract import AuxHiddenStream, TargetLayerId
from paceline.engine.cache import KeyValueCache
from paceline.engine.direct_drafts import direct_sequential_drafts
from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.proposal import Proposer, Rows
from paceline.engine.request import RequestResult, SamplingParameters
from paceline.engine.slots import SlotState
from paceline.models.attends import WholeSequence
from paceline.models.drafters.block_drafter import BlockDrafter
from paceline.models.drafters.eagle3 import Eagle3Drafter
from paceline.models.drafters.proposal import DraftSampling, Proposal
from paceline.models.loading import LoadedDrafter, LoadedTarget
from paceline.models.taps import TapCollector
from paceline.models.targets.dense import DenseTarget
from paceline.ops.attention import attention
from paceline.ops.sample_tokens import NO_TOKEN

_PROMPT_LENGTHS = (5, 23, 11)  # three for two slots: ragged, and one slot is used again
_NUM_TOKENS = 24
_SAMPLING = SamplingParameters(max_tokens=_NUM_TOKENS, ignore_eos=True)
_LEAST_EQUAL_SHARE = 0.9  # of served drafts; near-ties may fall either way in 16-bit arithmetic


@dataclass(frozen=True)
class CanaryReport:
    """What the canary saw.

    Attributes:
        num_steps: steps of the oracle run.
        num_drafts: oracle drafts judged.
        refusals: what was refused, in words; near-ties are not among them.
        num_near_ties: refusals where the two tokens' logits differ by rounding alone.
        num_compared: the drafter's own drafts, made from the cache and computed again without; 0 without a drafter.
        num_equal: of them, equal.
    """

    num_steps: int
    num_drafts: int
    refusals: tuple[str, ...]
    num_near_ties: int
    num_compared: int
    num_equal: int

    @property
    def has_passed(self) -> bool:
        """Whether nothing was refused and the drafter was served what it was trained for."""
        return not self.refusals and self.num_equal >= _LEAST_EQUAL_SHARE * self.num_compared


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


class WatchedProposer:
    """Keeps a drafter's context as in serving and notes what it drafts, but proposes a known text.

    Of each block the first drafts are right and the next is wrong, a different number each time, so that every count
    of accepted drafts occurs and the context is tried behind all of them.

    Args:
        inner: the drafter as served.
        script_of_slot: as for `ReplayProposer`.
        vocab_size: wrong drafts stay below it.
    """

    def __init__(self, inner: Proposer, script_of_slot: Callable[[int], Sequence[int] | None], vocab_size: int) -> None:
        self._inner, self._vocab_size = inner, vocab_size
        self._replay = ReplayProposer(script_of_slot, inner.num_draft_tokens)
        self.name, self.num_draft_tokens = "watched", inner.num_draft_tokens
        self.num_candidates, self.max_positions = 0, inner.max_positions
        self.target_layer_ids = inner.target_layer_ids
        self.aux_hidden_stream = inner.aux_hidden_stream
        self.noted: list[tuple[tuple[int, ...], int, list[int]]] = []  # text so far, anchor position, drafts

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
        proposal = self._inner.propose(rows, state, all_greedy=all_greedy, num_drafts=num_drafts)
        drafted: list[list[int]] = proposal.ids_BK.tolist()
        lengths: list[int] = state.lengths[rows.slots_B].tolist()
        ids_BK = self._replay.propose(rows, state, all_greedy=all_greedy, num_drafts=num_drafts).ids_BK
        for index, (slot, length) in enumerate(zip(rows.slots, lengths, strict=True)):
            script = tuple(self._replay.script_of_slot(slot) or ())
            self.noted.append((script, length, drafted[index]))
            num_right = length % (ids_BK.shape[1] + 1)
            if num_right < ids_BK.shape[1]:
                ids_BK[index, num_right] = (ids_BK[index, num_right] + 1) % self._vocab_size
        return Proposal(ids_BK)


def run_canary(target: LoadedTarget, drafter: LoadedDrafter | None, settings: EngineSettings) -> CanaryReport:
    """Run both checks on small engines of the same parts.

    Args:
        target: as served.
        drafter: as served; None runs only the oracle.
        settings: of the engine it stands for; slots and context are made small.
    """
    longest = max(_PROMPT_LENGTHS) + _NUM_TOKENS + 1
    small = replace(settings, max_num_seqs=2, max_model_len=longest, num_draft_tokens=None)
    # every block in full, and the drafter's own head: what is checked is what it was trained for
    small = replace(small, draft_length="fixed", num_drafts_by_batch_size=None, draft_vocab_size="full")
    generator = torch.Generator().manual_seed(20)
    vocab_size = target.contract.vocab_size
    prompts = [torch.randint(vocab_size, (size,), generator=generator).tolist() for size in _PROMPT_LENGTHS]
    plain = Engine(target, None, small).generate(prompts, _SAMPLING)
    num_draft_tokens = settings.num_draft_tokens or (drafter.num_draft_tokens if drafter is not None else 7)

    def replayed(slot: int) -> Sequence[int] | None:
        return scripts.get(oracle.request_in_slot(slot))

    oracle = Engine(target, None, small, proposer=ReplayProposer(replayed, num_draft_tokens))
    scripts = _add_all(oracle, plain)
    results = _run_all(oracle, scripts)
    refusals, num_near_ties = [], 0
    for right, result in zip(plain, results, strict=True):
        refusal, is_near_tie = _first_refusal(target.model, right, result)
        num_near_ties += is_near_tie
        if refusal is not None and not is_near_tie:
            refusals.append(refusal)
    records = [record for result in results for record in result.trace.records]
    num_equal, num_compared = 0, 0
    if drafter is not None:
        num_equal, num_compared = _watch(target, drafter, replace(small, num_draft_tokens=num_draft_tokens), plain)
    return CanaryReport(
        num_steps=len(records),
        num_drafts=sum(record.num_draft_tokens for record in records),
        refusals=tuple(refusals),
        num_near_ties=num_near_ties,
        num_compared=num_compared,
        num_equal=num_equal,
    )


def _watch(
    target: LoadedTarget, drafter: LoadedDrafter, settings: EngineSettings, plain: Sequence[RequestResult]
) -> tuple[int, int]:
    """Serve known texts with a watched drafter; returns how many of its drafts are right, and how many there are."""
    watched: list[WatchedProposer] = []

    def wrap(inner: Proposer) -> Proposer:
        watched.append(WatchedProposer(inner, lambda slot: scripts.get(engine.request_in_slot(slot)), vocab_size))
        return watched[0]

    vocab_size = target.contract.vocab_size
    engine = Engine(target, drafter, settings)
    engine.wrap_proposer(wrap)
    scripts = _add_all(engine, plain)
    _run_all(engine, scripts)
    num_equal, num_compared = 0, 0
    for text in dict.fromkeys(scripts.values()):
        # The last step of a request may draft behind the text's end, for nobody.
        blocks = [(n, drafts) for script, n, drafts in watched[0].noted if script == text and n < len(text)]
        num_equal += count_equal_drafts(target.model, drafter, text, blocks)
        num_compared += sum(len(drafts) for _, drafts in blocks)
    return num_equal, num_compared


def _add_all(engine: Engine, plain: Sequence[RequestResult]) -> dict[str | None, tuple[int, ...]]:
    """Queue finished requests again; returns their texts by name, which a replay needs from the first step on."""
    return {engine.add_request(result.prompt_ids, _SAMPLING): result.prompt_ids + result.token_ids for result in plain}


def _run_all(engine: Engine, scripts: dict[str | None, tuple[int, ...]]) -> list[RequestResult]:
    while engine.has_unfinished():
        engine.step()
    return [engine.result(name) for name in scripts if name is not None]


def _first_refusal(target: DenseTarget, right: RequestResult, result: RequestResult) -> tuple[str | None, bool]:
    """The first place where a replay left the plain text, and whether rounding alone explains it."""
    for record in result.trace.records:
        refused = record.refused_id
        if refused is not None:
            position = record.anchor_position + record.num_verified_accepted
            chosen = record.bonus_id if record.bonus_id is not None else refused
            text = (
                f"draft {record.num_verified_accepted} of step {record.step_index} was {refused}, the plain text; "
                f"the block's pass preferred {chosen}"
            )
            known = (right.prompt_ids + right.token_ids)[: position + 1]
            # A draft that is refused and then chosen all the same was never compared; rounding has no part in that.
            return text, refused != chosen and _is_near_tie(target, known, refused, chosen)
    if result.token_ids != right.token_ids:
        index = next(
            i for i, pair in enumerate(zip(result.token_ids, right.token_ids, strict=True)) if pair[0] != pair[1]
        )
        known = right.prompt_ids + right.token_ids[:index]
        text = f"token {index} is {result.token_ids[index]}; plain decoding gave {right.token_ids[index]}"
        return text, _is_near_tie(target, known, result.token_ids[index], right.token_ids[index])
    return None, False


@torch.inference_mode()
def _is_near_tie(target: DenseTarget, token_ids: Sequence[int], one: int, other: int) -> bool:
    """Whether two tokens score the same after a text, up to two units of the logits' last place."""
    ids_1T = torch.tensor([token_ids], device=target.norm.weight.device)
    positions_1T = torch.arange(ids_1T.shape[1], device=ids_1T.device).unsqueeze(0)
    logits = target.logits(target(ids_1T, positions_1T, WholeSequence())[:, -1:]).flatten()
    pair = logits[[one, other]].float()
    unit = max(torch.finfo(logits.dtype).eps, 1e-5) * float(pair.abs().max())
    return bool((pair[0] - pair[1]).abs() <= 2 * unit)


@dataclass(frozen=True)
class _DirectBlock:
    """Attention of one block over given context keys and values, per layer [T, M, H]."""

    context: Sequence[tuple[Tensor, Tensor]]
    windows: Sequence[int | None]
    causal: Sequence[bool]

    def __call__(
        self, layer: int, q_BTNH: Tensor, k_BTMH: Tensor, v_BTMH: Tensor, *, sink_N: Tensor | None = None
    ) -> Tensor:
        context_k, context_v = self.context[layer]
        k = torch.cat((context_k, k_BTMH[0])).transpose(0, 1)
        v = torch.cat((context_v, v_BTMH[0])).transpose(0, 1)
        key_S = torch.arange(k.shape[1], device=k.device)
        distance = key_S[context_k.shape[0] :, None] - key_S
        window = self.windows[layer]
        visible = (distance >= 0) if self.causal[layer] else torch.ones_like(distance, dtype=torch.bool)
        if window is not None:
            visible = visible & (distance.abs() < window)
        mixed = attention(q_BTNH.transpose(1, 2), k[None], v[None], visible=visible, sink_N=sink_N)
        return mixed.transpose(1, 2)


@torch.inference_mode()
def count_equal_drafts(
    target: DenseTarget, drafter: LoadedDrafter, text: Sequence[int], blocks: Sequence[tuple[int, Sequence[int]]]
) -> int:
    """Compute greedy drafts once more, from a whole text, without cache or chunks.

    Args:
        target: as served.
        drafter: as served.
        text: prompt and output.
        blocks: anchor position and drafts of each block; drafts of -1 are not compared.
    Returns:
        How many drafts come out the same.
    """
    model = drafter.model
    text_1T = torch.tensor([text], device=target.norm.weight.device)
    positions_T = torch.arange(len(text), device=text_1T.device)
    collector = TapCollector.of_layers(drafter.contract.target_layer_ids, drafter.contract.aux_hidden_stream)
    target(text_1T, positions_T.unsqueeze(0), WholeSequence(), collector)
    taps = collector.collected()
    num_equal = 0
    if isinstance(model, Eagle3Drafter):
        features_1TD = model.features(taps)
        for n, drafts in blocks:
            ids = direct_sequential_drafts(target, model, text_1T, features_1TD, n, len(drafts))
            num_equal += sum(a == b for a, b in zip(ids, drafts, strict=True))
        return num_equal
    context = model.backbone.context_kv(model.backbone.context_features(taps)[0], positions_T)
    for n, drafts in blocks:
        before = [(k[:n], v[:n]) for k, v in context]
        ids = _direct_block_drafts(target, model, text_1T[:, n], n, before, len(drafts))
        num_equal += sum(a == b for a, b in zip(ids, drafts, strict=True))
    return num_equal


def _direct_block_drafts(
    target: DenseTarget,
    model: BlockDrafter,
    anchors_1: Tensor,
    position: int,
    context: Sequence[tuple[Tensor, Tensor]],
    num_drafts: int,
) -> list[int]:
    """Greedy drafts of one block over given context keys and values."""
    block_ids = model.block_ids(anchors_1, num_drafts)
    embeddings = model.embed(block_ids, target).to(model.backbone.fc.weight.dtype)
    positions_1Q = position + torch.arange(block_ids.shape[1], device=anchors_1.device).unsqueeze(0)
    attend = _DirectBlock(context, model.contract.layer_windows, model.contract.layer_causal)
    hidden = model.predicted_rows(model.backbone(embeddings, positions_1Q, attend)).to(target.norm.weight.dtype)
    nobody = torch.zeros_like(anchors_1)
    greedy = DraftSampling("greedy", nobody.float(), nobody, nobody, nobody)
    ids: list[int] = model.propose(hidden, model.logits(hidden, target), anchors_1, greedy).ids_BK[0].tolist()
    return ids
