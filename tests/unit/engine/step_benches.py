"""Decode steps of every kind, over tiny models whose parts a test can look at and run again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from tests.tiny import loaded, tiny_prompts, wrap_drafter, wrap_target

from paceline.checkpoint.contract import DraftSampleMethod
from paceline.engine.admission import TokenLimits
from paceline.engine.attends import AttentionChoice
from paceline.engine.block_tables import BlockTables
from paceline.engine.cache import KeyValueCache
from paceline.engine.draft_stopper import DevicePlan, DraftStopper
from paceline.engine.prefill import PrefillChunk, prefill_chunk
from paceline.engine.proposal import BlockProposer, Rows
from paceline.engine.request import SamplingParameters
from paceline.engine.slots import SamplingFlags, SlotState
from paceline.engine.step import StepBatch, StepOutput, decode_step
from paceline.ops.acceptance import VerifyMethod

NUM_DRAFTS = 3
CAPACITY = 256
GREEDY = SamplingParameters()
SAMPLED = SamplingParameters(temperature=0.8)
TRUNCATED = SamplingParameters(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01)
RULED = SamplingParameters(temperature=0.8, repetition_penalty=1.3, bad_words=("no",), logit_bias={5: 1.0})


@dataclass(frozen=True)
class Kind:
    """What makes a step another one for the device.

    Attributes:
        name: for reports.
        family: of the drafter; None decodes plainly.
        sampling: of all requests.
        method: how drafts are drawn.
        verify_method: how they are judged.
        is_planned: requests get different numbers of drafts, and some are held back.
    """

    name: str
    family: str | None = None
    sampling: SamplingParameters = GREEDY
    method: DraftSampleMethod = "greedy"
    verify_method: VerifyMethod = "standard"
    is_planned: bool = False


KINDS = (
    Kind("plain greedy"),
    Kind("plain sampled", sampling=SAMPLED),
    Kind("plain truncated", sampling=TRUNCATED),
    Kind("plain with rules", sampling=RULED),
    Kind("dflash greedy", "dflash"),
    Kind("dflash sampled", "dflash", SAMPLED, "probabilistic"),
    Kind("dflash2 greedy", "dflash2"),
    Kind("dflash2 sampled", "dflash2", SAMPLED, "probabilistic"),
    Kind("dflash2 block", "dflash2", SAMPLED, "probabilistic", "block"),
    Kind("dflash2 match", "dflash2", SAMPLED, "greedy", "match"),
    Kind("dflash2 planned", "dflash2", SAMPLED, "probabilistic", is_planned=True),
    Kind("dspark sampled", "dspark", SAMPLED, "probabilistic"),
)


class StepBench:
    """Two requests in three slots, past their prompts."""

    def __init__(self, kind: Kind, choice: AttentionChoice, device: str = "cpu") -> None:
        self.kind, self.choice, self.device = kind, choice, torch.device(device)
        own: dict[str, Any] = {} if kind.family is None else {"drafter_family": kind.family}
        target, drafter = loaded("qwen3", linear_mode="plain", **own)
        self.target = wrap_target(target.model.to(device), "plain").model
        self.drafter = wrap_drafter(drafter.model.to(device), "plain").model
        tables = BlockTables.fixed(3, capacity=CAPACITY, device=self.device, block_size=32)
        contract, shape = target.contract, self.drafter.backbone.cache_shape
        sizes = (
            (contract.num_layers, contract.num_kv_heads, contract.head_size),
            (drafter.contract.num_layers, *shape),
        )
        self.cache, context = (
            KeyValueCache(
                tables, num_layers=layers, num_kv_heads=heads, head_size=size, dtype=torch.float32, device=self.device
            )
            for layers, heads, size in sizes
        )
        self.proposer: BlockProposer | None = None
        if kind.family is not None:
            self.proposer = BlockProposer(
                self.target, self.drafter, context, choice, num_draft_tokens=NUM_DRAFTS, method=kind.method
            )
        self.state = SlotState(
            3,
            num_draft_tokens=0 if self.proposer is None else NUM_DRAFTS,
            num_candidates=0 if self.proposer is None else self.proposer.num_candidates,
            device=self.device,
            vocab_size=contract.vocab_size,
        )
        self.stopper = DraftStopper(3, NUM_DRAFTS, self.device) if kind.is_planned else None
        self.flags = SamplingFlags.of([kind.sampling])
        self.slots_B, self.bounds_B = (torch.tensor(numbers, device=device) for numbers in ([2, 0], [100, 100]))
        self.plan = self._plan()
        self.begin()

    def _plan(self) -> DevicePlan | None:
        if self.proposer is None:
            return None
        if not self.kind.is_planned:
            return DevicePlan(NUM_DRAFTS, None, None, None, None)
        thresholds = torch.tensor([0.2, 0.3, 0.4], dtype=torch.float64, device=self.device)
        counts, flags = torch.tensor([3, 2], device=self.device), torch.tensor([True, False], device=self.device)
        return DevicePlan(NUM_DRAFTS, counts, thresholds, flags, flags)

    def begin(self) -> None:
        """Put both requests behind their prompts, whatever they were before."""
        sampling = self.kind.sampling
        limits = TokenLimits(
            repetition_penalty=sampling.repetition_penalty,
            bad_words=((7, 8),) if sampling.bad_words else (),
            bias_pairs=tuple(sampling.logit_bias or ()),
        )
        plan = None if self.plan is None else DevicePlan(NUM_DRAFTS, None, None, None, None)
        for slot, prompt in zip((2, 0), tiny_prompts([9, 14]), strict=True):
            self.state.admit(slot, sampling, seed=slot + 5, limits=limits, prompt_ids=prompt, end=90)
            chunk = PrefillChunk(slot, prompt, 0, None, self.flags, plan, self.stopper)
            prefill_chunk(self.target, self.proposer, self.cache, self.state, self.choice, chunk)
        self.state.flush()

    def step(self) -> StepOutput:
        """Run one step; every number that the host knows stays the same from call to call."""
        num_rows = 1 if self.proposer is None else NUM_DRAFTS + 1
        rows = Rows([2, 0], self.slots_B, [100, 100], self.bounds_B, num_rows)
        batch = StepBatch(
            rows,
            self.flags,
            writes_context=self.proposer is not None,
            plan=self.plan,
            verify_method=self.kind.verify_method,
            stopper=self.stopper,
        )
        return decode_step(self.target, self.proposer, self.cache, self.state, self.choice, batch)
