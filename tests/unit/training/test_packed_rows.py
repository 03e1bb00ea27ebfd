"""Packed rows: every conversation trains as if it were alone, whatever lies beside it, and each fault would be seen."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.training.packed_cases import FAMILIES, LENGTHS, MAX_LENGTH, OBJECTIVE, Packed, agree, place, with_tokens
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from paceline.models import attends
from paceline.models.drafters import backbone
from paceline.training import anchors as anchor_rules
from paceline.training import eagle3 as chain_rules
from paceline.training import features as features_module
from paceline.training import objective as objective_module
from paceline.training import step as step_module
from paceline.training.anchors import Blocks, all_anchors, block_visibility, make_blocks
from paceline.training.data import Batch, Packing
from paceline.training.features import TargetFeatures
from paceline.training.objective import Features, score_drafts
from paceline.training.step import StepResult, StepSettings, train_step


@pytest.fixture(params=FAMILIES)
def case(request: pytest.FixtureRequest) -> Packed:
    return Packed(request.param)


# --- packed equals separate ---


def anchors_of(blocks: Blocks, row: int, span: slice) -> list[int]:
    """Indices of the valid blocks of one conversation."""
    inside = (blocks.anchors_BA[row] >= span.start) & (blocks.anchors_BA[row] < span.stop) & blocks.valid_BA[row]
    return [int(block) for block in inside.nonzero().flatten()]


@torch.no_grad()
def features_agree(case: Packed) -> bool:
    packed, agrees = case.features_of(case.batch), True
    for index in range(len(LENGTHS)):
        (row, span), alone = place(index), case.features_of(case.alone(index))
        for one, other in zip((*packed.taps, packed.hidden_BSD), (*alone.taps, alone.hidden_BSD), strict=True):
            agrees &= agree(one[row, span], other[0])
    return agrees


@torch.no_grad()
def states_agree(case: Packed) -> bool:
    packed, blocks, agrees = case.states(), case.blocks(), True
    for index in range(len(LENGTHS)):
        row, span = place(index)
        alone, alone_blocks = case.states(case.alone(index)), case.blocks(case.alone(index))
        chosen = anchors_of(blocks, row, span)
        assert (blocks.anchors_BA[row, chosen] - span.start).tolist() == alone_blocks.anchors_BA[0].tolist()
        assert torch.equal(blocks.counts_BAQ[row, chosen], alone_blocks.counts_BAQ[0])
        assert torch.equal(blocks.positions_BAQ[row, chosen], alone_blocks.positions_BAQ[0])
        counts = alone_blocks.counts_BAQ[0, :, 1:]  # further drafts of a chain follow labels that are not its own
        agrees &= agree(packed[row, chosen][counts], alone[0][counts])
    return agrees


def test_features_are_those_of_each_conversation_alone(case: Packed) -> None:
    assert features_agree(case)


def test_states_are_those_of_each_conversation_alone(case: Packed) -> None:
    assert states_agree(case)


def test_loss_and_gradient_are_those_of_the_conversations_alone(case: Packed) -> None:
    together, gradients = case.gradients([case.batch])
    apart, expected = case.gradients([case.alone(index) for index in range(len(LENGTHS))])
    assert together == pytest.approx(apart, rel=1e-5)
    assert gradients.keys() == expected.keys() == dict(case.drafter.named_parameters()).keys()
    for name, gradient in gradients.items():
        assert agree(gradient, expected[name]), name


def step(case: Packed, batches: list[Batch]) -> StepResult:
    features = TargetFeatures(case.target, case.drafter.contract.target_layer_ids)
    optimizer = torch.optim.SGD(case.drafter.parameters(), lr=0.0)
    settings = StepSettings(OBJECTIVE, num_anchors=100, clip_norm=1e9, mixed_precision=False)
    return train_step(case.drafter, features, optimizer, batches, lambda part: torch.Generator(), 0.0, settings)


def test_a_step_over_packed_rows_is_the_step_over_their_conversations(case: Packed) -> None:
    together, apart = step(case, [case.batch]), step(case, [case.alone(index) for index in range(len(LENGTHS))])
    assert float(together.loss) == pytest.approx(float(apart.loss), rel=1e-5)
    assert float(together.gradient_norm) == pytest.approx(float(apart.gradient_norm), rel=1e-5)
    assert together.counted_Q.tolist() == apart.counted_Q.tolist()
    assert together.num_tokens == apart.num_tokens == sum(LENGTHS)


def without_documents(monkeypatch: pytest.MonkeyPatch, family: str, where: str) -> None:
    """Planted faults: rows are taken for one conversation."""
    if where == "target":
        monkeypatch.setattr(features_module, "sequence_attend", lambda model, documents_BT: attends.WholeSequence())
    elif family == "eagle3" and where == "settled":
        monkeypatch.setattr(chain_rules, "same_document", lambda documents, anchors: torch.tensor(True))
    elif family == "eagle3":
        monkeypatch.setattr(chain_rules, "WholeSequence", lambda documents_BT: attends.WholeSequence())
    else:
        sees = anchor_rules.sees_context

        def everywhere(*indices: Tensor, window: int | None, documents: object) -> Tensor:
            return sees(*indices, window=window)

        monkeypatch.setattr(anchor_rules, "sees_context", everywhere)


@pytest.mark.parametrize("where", ["drafter", "settled"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_mask_without_documents_would_be_seen(family: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without_documents(monkeypatch, family, where)
    assert not states_agree(Packed(family))


def test_a_target_that_reads_across_conversations_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    without_documents(monkeypatch, "dflash", "target")
    case = Packed("dflash")
    assert not features_agree(case) and not states_agree(case)


@torch.no_grad()
def test_positions_that_do_not_restart_would_be_seen(case: Packed) -> None:
    """In the target alone, in the context alone, and in the blocks alone."""
    sound, features, blocks = case.states(), case.features_of(case.batch), case.blocks()
    flat = torch.arange(MAX_LENGTH).expand(case.batch.positions_BS.shape)
    going_on = dataclasses.replace(case.batch, positions_BS=flat)
    case.batch, kept = going_on, case.batch
    assert not features_agree(case)
    case.batch = kept
    faulty: list[Tensor] = []
    if case.drafter.contract.family == "eagle3":
        faulty.append(case.states(going_on, features, blocks))
    else:
        packing = Packing(flat, case.batch.documents_BS)
        faulty.append(case.states(features=features, blocks=dataclasses.replace(blocks, packing=packing)))
        indices = blocks.anchors_BA.unsqueeze(-1) + torch.arange(case.num_rows)
        faulty.append(case.states(features=features, blocks=dataclasses.replace(blocks, positions_BAQ=indices)))
    second = anchors_of(blocks, *place(1))
    for states in faulty:
        assert not agree(states[0, second], sound[0, second], 1e-2)


# --- nothing else matters ---


def disturbed(case: Packed, row: int, block: int, span: slice) -> tuple[Batch, Features, Blocks]:
    """Everything that a block must not read holds something else: tokens, taps, and the rows of other blocks."""
    features, blocks, anchor = case.features_of(case.batch), case.blocks(), int(case.blocks().anchors_BA[row, block])
    hidden = torch.ones(case.batch.token_ids_BS.shape, dtype=torch.bool)
    hidden[row, span.start : anchor] = False
    taps = [torch.where(hidden.unsqueeze(-1), 50.0 + tap.flip(1), tap) for tap in features.taps]
    hidden[row, anchor] = False  # the anchor's token is known; its feature is not
    tokens = torch.where(hidden, (case.batch.token_ids_BS + 7) % 60, case.batch.token_ids_BS)
    others = torch.ones_like(blocks.valid_BA)
    others[row, block] = False
    labels = torch.where(others.unsqueeze(-1), (blocks.labels_BAQ + 5) % 60, blocks.labels_BAQ)
    return (
        with_tokens(case.batch, tokens),
        Features(taps, features.hidden_BSD),
        dataclasses.replace(blocks, labels_BAQ=labels),
    )


@torch.no_grad()
def leaks(case: Packed) -> bool:
    """Whether the states of some block change with what it must not read."""
    before, blocks, changed = case.states(), case.blocks(), False
    for index in range(len(LENGTHS)):
        row, span = place(index)
        for block in anchors_of(blocks, row, span):
            after = case.states(*disturbed(case, row, block, span))
            changed |= not torch.equal(before[row, block], after[row, block])
    return changed


@pytest.mark.parametrize("backend", [None, SDPBackend.MATH])
def test_a_block_reads_its_own_conversation_before_its_anchor_and_nothing_else(
    case: Packed, backend: SDPBackend | None
) -> None:
    if backend is None:
        assert not leaks(case)
    else:
        with sdpa_kernel(backend):
            assert not leaks(case)


def at_or_before(*indices: Tensor, window: int | None, documents: Any = None) -> Tensor:
    """Planted fault: `<=` instead of `<`."""
    anchor, _, key = indices
    visible = key <= anchor
    return visible if documents is None else visible & (documents[0] == documents[1])


@pytest.mark.parametrize("fault", ["anchor", "documents", "blocks", "convolution"])
def test_every_leak_would_be_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "anchor":
        monkeypatch.setattr(anchor_rules, "sees_context", at_or_before)
    elif fault == "documents":
        without_documents(monkeypatch, "dflash2", "drafter")
    elif fault == "blocks":
        monkeypatch.setattr(anchor_rules, "sees_row", lambda a, b, c, d, **kind: (a + b + c + d) > -1)
    else:
        offsets = backbone._offsets
        monkeypatch.setattr(backbone, "_offsets", lambda positions_BQ, block_rows: offsets(positions_BQ, None))
    assert leaks(Packed("dflash2"))


def test_leaks_of_chains_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    chains = chain_rules._Chains
    for fault in ("anchor", "neighbour"):

        def leaking(settled: Tensor, own: Tensor, whole: attends.WholeSequence, fault: str = fault) -> Any:
            if fault == "anchor":
                return chains(settled | settled.roll(1, dims=-1), own, whole)
            return chains(settled, torch.ones_like(own), whole)

        with monkeypatch.context() as patch:
            patch.setattr(chain_rules, "_Chains", leaking)
            assert leaks(Packed("eagle3")), fault


@torch.no_grad()
def test_through_the_target_no_token_of_another_conversation_matters(case: Packed) -> None:
    before, blocks = case.states(), case.blocks()
    for index in range(len(LENGTHS)):
        row, span = place(index)
        tokens = (case.batch.token_ids_BS + 11) % 60
        tokens[row, span] = case.batch.token_ids_BS[row, span]
        after = case.states(with_tokens(case.batch, tokens))
        chosen = anchors_of(blocks, row, span)
        counts = blocks.counts_BAQ[row, chosen, 1:]
        assert torch.equal(after[row, chosen][counts], before[row, chosen][counts])


@torch.no_grad()
def test_padding_may_hold_anything(case: Packed) -> None:
    tokens = case.batch.token_ids_BS.masked_fill(case.batch.documents_BS < 0, 33)
    assert not torch.equal(tokens, case.batch.token_ids_BS)
    other, counts = with_tokens(case.batch, tokens), case.blocks().counts_BAQ[..., 1:]
    assert torch.equal(case.states(other)[counts], case.states()[counts])
    assert torch.equal(case.score(other).loss_sum, case.score().loss_sum)


def test_padding_belongs_to_nobody_wherever_it_lies() -> None:
    """Numbered -1, it matches no conversation and not itself; nothing is left without anything to see."""
    documents = torch.tensor([[-1, 0, 0, -1, -1, 1, 1, -1]])
    seen = [row.nonzero().flatten().tolist() for row in attends.document_visibility(documents)[0]]
    assert seen == [[0], [1], [1, 2], [3], [4], [5], [5, 6], [7]]
    visible = block_visibility(torch.tensor([[6, 0]]), 2, 8, window=None, causal=False, documents_BS=documents)[0]
    assert [row.nonzero().flatten().tolist() for row in visible] == [[5, 8, 9], [5, 8, 9], [10, 11], [10, 11]]


@pytest.mark.parametrize("is_empty", [False, True])
def test_rows_without_an_anchor_cost_nothing(case: Packed, is_empty: bool) -> None:
    """A row of padding alone has nothing to see, in no layer of target or drafter."""
    nothing = torch.zeros_like(case.batch.supervised_BS)
    batch = dataclasses.replace(case.batch, supervised_BS=nothing)
    if is_empty:
        batch = dataclasses.replace(batch, documents_BS=torch.full_like(batch.documents_BS, -1))
    assert not all_anchors(batch.supervised_BS, batch.packing)[1].any()
    assert torch.isfinite(case.states(batch)).all()
    loss, gradients = case.gradients([batch])
    assert loss == 0.0 and gradients.keys() == dict(case.drafter.named_parameters()).keys()
    assert all(torch.count_nonzero(gradient) == 0 for gradient in gradients.values())


# --- labels ---


def teachers(case: Packed, blocks: Blocks) -> list[int]:
    """Indices in row 0 whose target state teaches one of these blocks."""
    features, found = case.features_of(case.batch), []
    hidden_BAKD = case.states(features=features, blocks=blocks).detach()

    def loss(hidden_BSD: Tensor) -> Tensor:
        objective = dataclasses.replace(OBJECTIVE, kl=1.0, ce=0.0, confidence=0.0)
        given = features._replace(hidden_BSD=hidden_BSD)
        return score_drafts(case.drafter, hidden_BAKD, given, blocks, case.features_of.head_VD, objective).loss_sum

    before = loss(features.hidden_BSD)
    for index in range(MAX_LENGTH):
        hidden_BSD = features.hidden_BSD.clone()
        hidden_BSD[0, index] += 1.0
        if not torch.equal(loss(hidden_BSD), before):
            found.append(index)
    return found


@pytest.mark.parametrize(("family", "num_drafts"), [("dflash", 3), ("dspark", 4)])
@torch.no_grad()
def test_the_layout_of_the_specification_holds_inside_a_row(family: str, num_drafts: int) -> None:
    """Anchor 10, block of 4, in the second conversation of a row, which starts at 12.

    Fill-in: labels 11..13, taught at 10..12. Anchor-sampling: labels 11..14, taught at 10..13. Both: rows at 10..13,
    the anchor before the first label, context 0..9.
    """
    start, supervised = 12, np.ones(sum(LENGTHS), bool)
    case = Packed(family, supervised=supervised)
    documents = (torch.arange(MAX_LENGTH) >= start).int().expand(2, -1)
    position_S = torch.arange(MAX_LENGTH)
    positions = torch.where(position_S < start, position_S, position_S - start).expand(2, -1)
    tokens = torch.arange(MAX_LENGTH).expand(2, -1)
    everywhere = torch.ones(2, MAX_LENGTH, dtype=torch.bool)
    case.batch = Batch(tokens, everywhere, torch.tensor([28, 28]), positions, documents, is_packed=True)
    anchors, valid = torch.full((2, 1), start + 10), torch.tensor([[True], [False]])
    blocks = make_blocks(tokens, everywhere, anchors, valid, num_drafts + 1, case.batch.packing)
    rows = case.drafter.contract.block_size
    assert blocks.positions_BAQ[0, 0, :rows].tolist() == [10, 11, 12, 13]
    assert blocks.counts_BAQ[0, 0].tolist() == [False] + [True] * num_drafts
    assert blocks.labels_BAQ[0, 0].tolist() == [start + 10 + k for k in range(num_drafts + 1)]
    visible = block_visibility(anchors, rows, MAX_LENGTH, window=None, causal=False, documents_BS=documents)[0]
    for row in visible[:, :MAX_LENGTH]:
        assert row.nonzero().flatten().tolist() == [start + position for position in range(10)]
    assert teachers(case, blocks) == [start + 10 + k for k in range(num_drafts)]
    drafts = objective_module._rows(case.states(blocks=blocks), case.features_of(case.batch), blocks, OBJECTIVE)
    assert drafts.previous_R.tolist() == [start + 10 + k for k in range(num_drafts)]
    assert drafts.labels_R.tolist() == [start + 11 + k for k in range(num_drafts)]


@pytest.mark.parametrize("block_size", [4, 5])
def test_labels_follow_their_anchor_in_a_toy_vocabulary(block_size: int) -> None:
    """Every token is the one before it plus one: label k of any block is its anchor plus k, in both layouts."""
    tokens = np.concatenate([100 * index + np.arange(length) for index, length in enumerate(LENGTHS)])
    batch = Packed("dflash", tokens=tokens).batch

    def holds(blocks: Blocks) -> bool:
        expected = batch.token_ids_BS.gather(1, blocks.anchors_BA).unsqueeze(-1) + torch.arange(block_size)
        return torch.equal(blocks.labels_BAQ[blocks.counts_BAQ], expected[blocks.counts_BAQ])

    anchors, valid = all_anchors(batch.supervised_BS, batch.packing)
    marks = (batch.supervised_BS, anchors, valid, block_size, batch.packing)
    blocks = make_blocks(batch.token_ids_BS, *marks)
    assert holds(blocks) and blocks.counts_BAQ.sum() > 50
    assert not holds(make_blocks(batch.token_ids_BS.roll(-1, dims=1), *marks)), "a shift by one would be missed"


def marked(text: str) -> tuple[Tensor, Packing]:
    """'#' supervised, '.' not, '|' the border before a conversation's first token; capitals are not needed."""
    parts = text.split("|")
    supervised = torch.tensor([[mark == "#" for mark in "".join(parts)]])
    positions = torch.cat([torch.arange(len(part)) for part in parts]).unsqueeze(0)
    documents = torch.cat([torch.full((len(part),), index) for index, part in enumerate(parts)]).int().unsqueeze(0)
    return supervised, Packing(positions, documents)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("..##.###|####", {2: "#...", 5: "##..", 6: "#...", 9: "##..", 10: "#..."}),
        ("..####|..###", {2: "###.", 3: "##..", 4: "#...", 8: "##..", 9: "#..."}),
        ("..##|#|..##", {2: "#...", 7: "#..."}),  # a conversation of one token has no anchor
        (".####.####|#", {1: "###.", 2: "##..", 3: "#...", 6: "###.", 7: "##..", 8: "#..."}),  # a gap of one token
    ],
)
def test_drafts_count_until_a_gap_or_the_end_of_the_conversation(text: str, expected: dict[int, str]) -> None:
    supervised, packing = marked(text)
    anchors, valid = all_anchors(supervised, packing)
    tokens = torch.arange(supervised.shape[1]).unsqueeze(0)
    blocks = make_blocks(tokens, supervised, anchors, valid, 5, packing)
    found = {
        int(anchor): "".join(".#"[int(mark)] for mark in counts[1:])
        for anchor, counts in zip(blocks.anchors_BA[0], blocks.counts_BAQ[0], strict=True)
    }
    assert found == expected


@pytest.mark.parametrize("fault", [None, "labels", "marks"])
def test_a_block_takes_no_label_from_the_next_conversation(
    case: Packed, fault: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Conversation 1 is supervised from its first token on: no prompt lies between it and the end of conversation 0.

    Planted faults: labels are looked up without asking whose they are, and marks are read one token early.
    """
    expected = step(case, [case.alone(index) for index in range(len(LENGTHS))]).counted_Q.tolist()
    original = anchor_rules.make_blocks

    def faulty(ids: Tensor, marks: Tensor, anchors: Tensor, valid: Tensor, size: int, packing: Packing) -> Blocks:
        if fault == "labels":
            packing = Packing(packing.positions_BS, torch.zeros_like(packing.documents_BS))
        return original(ids, marks.roll(-1, dims=1) if fault == "marks" else marks, anchors, valid, size, packing)

    monkeypatch.setattr(step_module, "make_blocks", faulty)
    assert (step(case, [case.batch]).counted_Q.tolist() == expected) == (fault is None)


@pytest.mark.parametrize("choose", ["sample", "all"])
def test_anchors_stay_inside_conversations(choose: str) -> None:
    """Never a first token, never a last one: its successor is another conversation's."""
    supervised, packing = marked("####|###|.###..|##")
    rules: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
        "sample": lambda: anchor_rules.sample_anchors(supervised, 20, torch.Generator(), packing),
        "all": lambda: all_anchors(supervised, packing),
    }
    anchors, valid = rules[choose]()
    assert anchors[valid].tolist() == [1, 2, 5, 8, 9]
