"""Steps of hybrid targets can be recorded: nothing in them reads a value on the host, and playback is running again.

On meta tensors there are no values to read: whatever asks for one, or for a shape that depends on one, fails. So such a
pass takes the place of a capture where there is no GPU. Kernels are counted, and not run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from benchmarks import sanitize
from tests import tiny
from tests.hybrid_runs import FAMILIES, VOCAB_SIZE, drafter_for, prompts_of
from tests.tiny_kimi import VARIANTS, k3_tiny_config, kimi_contract, kimi_target
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.engine.attends import AttentionChoice
from paceline.engine.draft_stopper import DevicePlan
from paceline.engine.engine import EngineSettings
from paceline.engine.parts import EngineParts, make_parts
from paceline.engine.prefill import PrefillChunk, prefill_chunk
from paceline.engine.proposal import Rows
from paceline.engine.recordings import CudaRecording, Recording, Repeated
from paceline.engine.recurrent_state import RecurrentState, StateCopies
from paceline.engine.request import SamplingParameters
from paceline.engine.sampling_flags import SamplingFlags
from paceline.engine.step import StepBatch, StepOutput, decode_step
from paceline.engine.target_cache import begin_text
from paceline.models.drafters.proposal import Proposal
from paceline.models.layers import LinearMode
from paceline.models.loading import LoadedTarget
from paceline.models.targets.kimi import KimiTarget
from paceline.ops import mixture_of_experts
from paceline.ops.dispatch import HAS_TRITON

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
SETTINGS = EngineSettings(max_num_seqs=3, max_model_len=144, block_size=16, num_snapshots=4)
GREEDY, SAMPLED = SamplingParameters(), SamplingParameters(temperature=0.4, top_p=0.95, seed=3)
META = torch.device("meta")


class DeviceOnly(TorchDispatchMode):
    """Refuses what moves numbers between host and device, and records what is launched."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [value for value in (*args, *(kwargs or {}).values()) if isinstance(value, torch.Tensor)]
        if any(value.device.type == "cpu" for value in tensors):
            raise AssertionError(f"{func} reads a tensor of the host")
        self.calls.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def takes_tables(patch: pytest.MonkeyPatch) -> None:
    """The form of attention that a GPU has."""
    choice = AttentionChoice(is_batched=True, is_row_invariant=False, is_paged=True)
    patch.setattr(AttentionChoice, "for_device", lambda *_args, **_options: choice)


@contextmanager
def kernels_on_meta(patch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Operations take their kernels, whose launches are counted and come to nothing."""
    with sanitize.counted_launches() as launched:
        for name, one in sanitize._kernels():
            one.run = lambda *_args, _name=name, **_options: launched.append(_name)
        for name, module in list(sys.modules.items()):
            if name.startswith("paceline.ops.") and hasattr(module, "choose"):
                patch.setattr(module, "choose", lambda _name, _tensor, _reference, kernel, _native=None: kernel)
        yield launched


def batch_of(parts: EngineParts, num_requests: int, sampling: SamplingParameters = GREEDY) -> StepBatch:
    """A step of the first slots, every number of which stands on the device."""
    device, num_drafts = parts.state.device, parts.num_draft_tokens
    slots_B = torch.arange(num_requests, device=device)
    nowhere = [0] * num_requests
    rows = Rows([parts.state.trash_slot] * num_requests, slots_B, nowhere, torch.zeros_like(slots_B), num_drafts + 1)
    assert parts.snapshots is not None
    return StepBatch(
        rows,
        SamplingFlags.of([sampling]),
        writes_context=parts.proposer is not None,
        plan=DevicePlan(num_drafts, None, None, None, None) if num_drafts else None,
        state_copies=StateCopies(parts.snapshots, slots_B + 1, parts.sizes.block_size),
    )


def run_step(parts: EngineParts, batch: StepBatch) -> StepOutput:
    return decode_step(parts.target.model, parts.proposer, parts.cache, parts.state, parts.choice, batch)


def meta_parts(
    patch: pytest.MonkeyPatch, family: str | None = None, mode: LinearMode = "plain", **changes: Any
) -> EngineParts:
    """An engine's parts without any numbers."""
    takes_tables(patch)
    patch.setattr(tiny, "_fill", lambda *_args: None)
    with META:
        target = tiny.wrap_target(KimiTarget(kimi_contract(k3_tiny_config(**changes))), mode)  # type: ignore[arg-type]
        drafter = None if family is None else drafter_for.__wrapped__(target, family)
        if drafter is not None:
            drafter.model.prepare_for_serving(mode)
        parts = make_parts(target, drafter, SETTINGS, None)
    parts.tables.flush()
    parts.state.flush()
    return parts


@torch.inference_mode()
def recorded_calls(patch: pytest.MonkeyPatch, parts: EngineParts, sampling: SamplingParameters = GREEDY) -> list[str]:
    batch = batch_of(parts, 2, sampling)
    with kernels_on_meta(patch) as launched, DeviceOnly() as mode:
        output = run_step(parts, batch)
    assert output.tokens_BT.shape == (2, parts.num_draft_tokens + 1)
    assert {"_delta_kernel", "_replay_kernel", "_paged_latent_attention_kernel"} <= set(launched)
    return [*mode.calls, *launched]


@pytest.mark.parametrize(("sampling", "mode"), [(GREEDY, "plain"), (SAMPLED, "fused")], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", [None, *FAMILIES])
def test_a_step_reads_no_value(
    family: str | None, sampling: SamplingParameters, mode: LinearMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded_calls(monkeypatch, meta_parts(monkeypatch, family, mode), sampling)


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "k3"])
def test_no_variant_reads_a_value(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded_calls(monkeypatch, meta_parts(monkeypatch, **VARIANTS[variant]))


def experts_that_ask(patch: pytest.MonkeyPatch) -> None:
    """The form that goes from expert to expert."""
    patch.setattr(mixture_of_experts, "_mix_by_kernels", mixture_of_experts._mix_grouped)


def masked_commits(patch: pytest.MonkeyPatch) -> None:
    """Only requests that go on are replayed: how many these are, the device knows."""
    commit = RecurrentState.commit

    def those_that_count(self: Any, slots_B: Any, counts_B: Any, num_rows: int, copies: Any = None) -> None:
        commit(self, slots_B[counts_B > 0], counts_B[counts_B > 0], num_rows, None)

    patch.setattr(RecurrentState, "commit", those_that_count)


def counts_from_the_host(patch: pytest.MonkeyPatch) -> None:
    """The store's places come from the host in the middle of the step."""
    commit = RecurrentState.commit

    def from_a_list(self: Any, slots_B: Any, counts_B: Any, num_rows: int, copies: Any = None) -> None:
        commit(self, slots_B, counts_B + torch.tensor([0, 0]), num_rows, copies)

    patch.setattr(RecurrentState, "commit", from_a_list)


@pytest.mark.parametrize("plant", [experts_that_ask, masked_commits, counts_from_the_host])
def test_a_planted_question_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = meta_parts(monkeypatch)
    plant(monkeypatch)
    with pytest.raises((RuntimeError, NotImplementedError, AssertionError), match=r"meta|host"):
        recorded_calls(monkeypatch, parts)


class Side:
    """One of two engines' parts that must go the same way.

    Args:
        target: on its device.
        family: of the drafter; None decodes plainly.
        prompts: one per slot, from the first on.
        sampling: of all of them.
    """

    def __init__(
        self, target: LoadedTarget, family: str | None, prompts: list[list[int]], sampling: SamplingParameters
    ) -> None:
        device = target.model.norm.weight.device
        drafter = None if family is None else drafter_for.__wrapped__(target, family)
        if drafter is not None:
            drafter.model.to(device, target.model.norm.weight.dtype)
            drafter = tiny.wrap_drafter(drafter.model, target.linear_mode)
        self.parts = make_parts(target, drafter, SETTINGS, None)
        parts, blocks = self.parts, iter(torch.randperm(27, generator=torch.Generator().manual_seed(0)).tolist())
        for slot, prompt in enumerate(prompts):
            parts.tables.assign(slot, [1 + next(blocks) for _ in range(9)])
            parts.tables.flush()
            parts.state.admit(slot, sampling, seed=slot)
            begin_text(parts.cache, slot)
            chunk = PrefillChunk(slot, prompt, 0, None, SamplingFlags.of([sampling]))
            assert prefill_chunk(target.model, parts.proposer, parts.cache, parts.state, parts.choice, chunk)
        parts.state.flush()
        self.batch = batch_of(parts, len(prompts), sampling)

    def run(self) -> StepOutput:
        return run_step(self.parts, self.batch)

    def offer(self, drafts: list[list[int]]) -> None:
        state = self.parts.state
        state.store_proposal(self.batch.rows.slots_B, Proposal(torch.tensor(drafts, device=state.device)))

    def kept(self) -> list[torch.Tensor]:
        """All that a step may change, but what nobody reads: the trash slot and its block, and what records hold."""
        parts, recurrent = self.parts, self.parts.recurrent
        assert recurrent is not None and parts.snapshots is not None
        state = parts.state
        by_slot = [state.lengths, state.anchors, state.steps, state.draft_ids, recurrent.ends_S]
        caches = [parts.cache.latents.planes[:, :, :, 1:]]  # type: ignore[union-attr]
        if parts.proposer is not None and parts.proposer.cache is not None:
            caches.append(parts.proposer.cache.planes[:, :, :, 1:])
        states = [part[:, :-1] for part in recurrent.rows]
        return [values[:-1] for values in by_slot] + caches + states + list(parts.snapshots)


def plain_texts(target: LoadedTarget, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Greedy texts, prompts included: good drafts."""
    side = Side(target, None, prompts, GREEDY)
    columns = [side.parts.state.anchors[:-1].tolist()]
    columns += [side.run().tokens_BT[:, 0].tolist() for _ in range(num_tokens)]
    return [[*prompt, *text] for prompt, text in zip(prompts, zip(*columns, strict=True), strict=True)]


def follow(run: Callable[[], Recording], one: Side, other: Side, texts: list[list[int]], num_steps: int) -> int:
    """Run one side, play the other back, and compare after every step; returns the drafts that were kept."""
    kept, playback, num_drafts = 0, None, one.parts.num_draft_tokens
    for number in range(num_steps):
        if num_drafts and number % 3:  # drafts of which some are right
            firsts = [length + 1 for length in one.parts.state.lengths[:-1].tolist()]
            spans = [text[first : first + num_drafts] for text, first in zip(texts, firsts, strict=True)]
            drafts = [(span + [5] * num_drafts)[:num_drafts] for span in spans]
            drafts[number % 3][number % num_drafts] = 7
            one.offer(drafts)
            other.offer(drafts)
        expected = one.run()
        if playback is None and number > 0:
            playback = run()
        found = other.run() if playback is None else playback.replay()
        for name in ("tokens_BT", "accepted_B", "fault_B", "positions_B", "draft_ids_BK"):
            assert torch.equal(getattr(found, name), getattr(expected, name)), (number, name)
        for ours, theirs in zip(other.kept(), one.kept(), strict=True):
            assert torch.equal(ours.nan_to_num(), theirs.nan_to_num()), number
        kept += int(expected.accepted_B.sum())
    return kept


def both_sides(
    device: torch.device, dtype: torch.dtype, family: str | None, sampling: SamplingParameters, num_tokens: int
) -> tuple[Side, Side, list[list[int]]]:
    def target() -> LoadedTarget:
        model = kimi_target(k3_tiny_config(vocab_size=VOCAB_SIZE), dtype=dtype).to(device)
        return tiny.wrap_target(model, "fused" if dtype == torch.bfloat16 else "plain")  # type: ignore[arg-type]

    prompts = prompts_of([9, 30, 14])
    one, other = (Side(target(), family, prompts, sampling) for _ in range(2))
    return one, other, plain_texts(target(), prompts, num_tokens)


@pytest.mark.gpu
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", [None, "dflash", "dflash2"])
@torch.inference_mode()
def test_a_captured_step_is_the_step_itself(
    family: str | None, dtype: torch.dtype, sampling: SamplingParameters
) -> None:
    device = torch.device("cuda")
    one, other, texts = both_sides(device, dtype, family, sampling, 60)
    pool = torch.cuda.graph_pool_handle()
    kept = follow(lambda: CudaRecording(other.run, pool, device), one, other, texts, 20)
    assert kept > 0 or family is None


@torch.inference_mode()
def test_two_sides_go_the_same_way_and_a_changed_state_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison itself, with a step that is simply run again; then one state cell differs."""
    takes_tables(monkeypatch)
    one, other, texts = both_sides(torch.device("cpu"), torch.float32, "dflash", GREEDY, 12)
    assert follow(lambda: Repeated(other.run), one, other, texts, 5) > 0
    assert other.parts.recurrent is not None
    other.parts.recurrent.rows.states_LSNKK[0, 1, 0, 0, 0] += 1.0
    with pytest.raises(AssertionError):
        follow(lambda: Repeated(other.run), one, other, texts, 2)
