"""Flex attention of training blocks is attention under the dense mask: masks bit by bit, outputs, gradients.

A CPU has flex attention without gradients, and compiles it slowly; `masked_attention` stands in for it there, reading
the same mask. The real one is compared on a CPU forward, and both ways on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.models.conftest import tiny_drafter
from tests.unit.training.packed_cases import FAMILIES, OBJECTIVE, Packed, agree
from tests.unit.training.test_objective import CONTRACTS, Case
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask

from paceline.models.attends import BlocksOverContext
from paceline.ops.attention import attention
from paceline.training import flex_attend as flex_module
from paceline.training.anchors import block_visibility
from paceline.training.drafting import greedy_drafts
from paceline.training.flex_attend import FlexBlocks, FlexBlocksOverContext, padded
from paceline.training.objective import draft_blocks
from paceline.training.step import StepSettings, train_step

KINDS: dict[str, dict[str, Any]] = {
    "full": {"window": None, "causal": False},
    "causal": {"window": None, "causal": True},
    "window": {"window": 5, "causal": False},
    "causal-window": {"window": 3, "causal": True},
}
LENGTHS = [1, 127, 128, 129, 1000]
PLAIN = FlexBlocks(0, 0, is_compiled=False)
EAGER = "flex_attention called without torch.compile"
# Torch's compiler warns of its own parts; that something is not compiled is still an error.
compiled = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning", f"error:{EAGER}"
)


def some_anchors(context_size: int, num_blocks: int, *, num_rows: int = 2, seed: int = 0) -> Tensor:
    """Sorted, with invalid ones at 0 in the second row."""
    generator = torch.Generator().manual_seed(seed)
    anchors = torch.randint(0, context_size, (num_rows, num_blocks), generator=generator).sort(1).values
    anchors[1, : num_blocks // 2] = 0
    return anchors


def some_documents(context_size: int, num_rows: int = 2) -> Tensor:
    """Three conversations and padding in the first row, two elsewhere."""
    position_S = torch.arange(context_size)
    first = position_S * 4 // context_size
    second = position_S * 2 // context_size
    return torch.stack([first.where(first < 3, -1), *[second] * (num_rows - 1)]).int()


def materialised(mask: BlockMask) -> Tensor:
    """bool [B, R, K] of the rule; and tiles that are left out hold nothing."""
    B, _, R, K = mask.shape
    device = mask.kv_num_blocks.device
    pairs = create_mask(mask.mask_mod, B, None, R, K, device=device.type)[:, 0]
    tiles = pairs.unflatten(1, (-1, 128)).unflatten(3, (-1, 128)).any(4).any(2)
    assert torch.equal(mask.to_dense()[:, 0].bool(), tiles)
    return pairs


def mask_is_dense(flex: FlexBlocks, anchors: Tensor, context_size: int, documents: Tensor | None, kind: Any) -> bool:
    """Whether a mask is `block_visibility`, and padding is seen by nobody and sees only its own block."""
    Q, num_rows = 3, anchors.shape[1] * 3
    pairs = materialised(flex.mask(anchors, Q, context_size, documents_BS=documents, **kind))
    dense = block_visibility(anchors, Q, context_size, documents_BS=documents, **kind)
    S = pairs.shape[2] - pairs.shape[1]
    assert padded(S) == S and padded(pairs.shape[1]) == pairs.shape[1]
    own, beyond = pairs[:, :num_rows, S : S + num_rows], pairs[:, num_rows:]
    found = torch.cat((pairs[:, :num_rows, :context_size], own), dim=2)
    unseen = [pairs[:, :num_rows, context_size:S], pairs[:, :num_rows, S + num_rows :], beyond[:, :, : S + num_rows]]
    sees_itself = pairs[:, :, S:].diagonal(dim1=1, dim2=2)
    return torch.equal(found, dense) and not any(bool(part.any()) for part in unseen) and bool(sees_itself.all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("context_size", LENGTHS)
@pytest.mark.parametrize("packed", [False, True])
def test_a_mask_is_the_dense_one_bit_by_bit(kind: str, context_size: int, packed: bool) -> None:
    for num_blocks, flex in ((1, PLAIN), (50, PLAIN), (7, FlexBlocks(1000, 50, is_compiled=False))):
        documents = some_documents(context_size) if packed else None
        assert mask_is_dense(flex, some_anchors(context_size, num_blocks), context_size, documents, KINDS[kind])


@given(
    anchors=st.lists(st.integers(0, 11), min_size=1, max_size=4),
    documents=st.none() | st.lists(st.integers(-1, 2), min_size=12, max_size=12),
    window=st.none() | st.integers(1, 14),
    causal=st.booleans(),
)
def test_a_mask_is_the_dense_one_for_any_anchors(
    anchors: list[int], documents: list[int] | None, window: int | None, causal: bool
) -> None:
    kind, told = {"window": window, "causal": causal}, None if documents is None else torch.tensor([documents])
    assert mask_is_dense(PLAIN, torch.tensor([anchors]), 12, told, kind)


def test_a_mask_of_the_batch_before_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: whoever keeps masks by their sizes serves the anchors of an earlier batch."""
    kept: dict[tuple[int, ...], BlockMask] = {}
    build = create_block_mask

    def cached(rule: Any, B: int, H: None, R: int, K: int, **rest: Any) -> BlockMask:
        return kept.setdefault((B, R, K), build(rule, B, H, R, K, **rest))

    batches = [some_anchors(200, 20, seed=seed) for seed in range(2)]
    assert all(mask_is_dense(PLAIN, anchors, 200, None, KINDS["full"]) for anchors in batches)
    monkeypatch.setattr(flex_module, "create_block_mask", cached)
    assert [mask_is_dense(PLAIN, anchors, 200, None, KINDS["full"]) for anchors in batches] == [True, False]


def test_a_border_of_conversations_that_is_ignored_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    sees, documents = flex_module.sees_context, some_documents(200)
    monkeypatch.setattr(
        flex_module, "sees_context", lambda *indices, window, documents: sees(*indices, window=window, documents=None)
    )
    assert not mask_is_dense(PLAIN, some_anchors(200, 20), 200, documents, KINDS["full"])
    assert mask_is_dense(PLAIN, some_anchors(200, 20), 200, None, KINDS["full"])


def test_layers_of_a_kind_share_a_mask_and_batches_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[BlockMask] = []

    def counted(*sizes: Any, **rest: Any) -> BlockMask:
        built.append(create_block_mask(*sizes, **rest))
        return built[-1]

    monkeypatch.setattr(flex_module, "create_block_mask", counted)
    context, kinds = [(torch.zeros(2, 9, 1, 4),) * 2] * 4, [(None, False), (3, True), (None, False), (3, False)]
    for seed in range(2):
        attend = PLAIN.over_context(context, kinds, some_anchors(9, 4, seed=seed), 3)
        assert attend.masks[0] is attend.masks[2]
        assert len({id(mask) for mask in attend.masks}) == 3
    assert len(built) == 6


# --- outputs and gradients, through a stand-in that reads the mask ---


def masked_attention(q: Tensor, k: Tensor, v: Tensor, *, block_mask: BlockMask, enable_gqa: bool) -> Tensor:
    """What flex attention computes, by the dense operation."""
    assert enable_gqa and q.shape[-2] == block_mask.shape[-2] and k.shape[-2] == block_mask.shape[-1]
    return attention(q, k, v, visible=materialised(block_mask).unsqueeze(1))


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Counts calls."""
    calls: list[int] = []

    def counted(*tensors: Tensor, **rest: Any) -> Tensor:
        calls.append(1)
        return masked_attention(*tensors, **rest)

    monkeypatch.setattr(flex_module, "flex_attention", counted)
    yield calls
    assert calls, "flex attention never ran"


def both_ways(case: Case | Packed, flex: FlexBlocks) -> list[tuple[Tensor, list[Tensor]]]:
    """States of all blocks, and the gradients of all parameters, by dense masks and by flex attention."""
    found = []
    for chosen in (None, flex):
        if isinstance(case, Packed):
            ids = case.drafter.block_ids(case.blocks().labels_BAQ[:, :, 0], case.drafter.contract.num_draft_tokens)
            rows, taps, blocks = case.drafter.embed(ids, case.target), case.features_of(case.batch).taps, case.blocks()
        else:
            rows, taps, blocks = case.rows(), case.taps, case.blocks
        states = draft_blocks(case.drafter, taps, rows, blocks, chosen)
        weights = torch.randn(states.shape, generator=torch.Generator().manual_seed(2))
        parameters = [p for n, p in case.drafter.named_parameters() if n.startswith("backbone.layers")]
        gradients = torch.autograd.grad((states * weights).sum(), parameters, allow_unused=True)
        found.append((states.detach(), [gradient for gradient in gradients if gradient is not None]))
    return found


@pytest.mark.parametrize("name", [*CONTRACTS, *(family for family in FAMILIES if family != "eagle3")])
@pytest.mark.parametrize("flex", [PLAIN, FlexBlocks(300, 60, is_compiled=False)], ids=["as-is", "padded"])
def test_states_and_gradients_are_those_of_dense_masks(name: str, flex: FlexBlocks, stand_in: list[int]) -> None:
    """Every kind of layer; packed rows with padding and invalid anchors; sizes of the batch and of a larger one."""
    case = Case(tiny_drafter(**CONTRACTS[name])) if name in CONTRACTS else Packed(name)
    (dense, of_dense), (found, of_flex) = both_ways(case, flex)
    assert agree(found, dense)
    assert len(of_dense) == len(of_flex) > 0
    for one, other in zip(of_dense, of_flex, strict=True):
        assert agree(other, one)


@pytest.mark.parametrize("family", ["dflash", "dflash2", "dspark"])
def test_a_step_learns_the_same_and_measuring_keeps_dense_masks(family: str, stand_in: list[int]) -> None:
    case = Packed(family)

    def step(flex: FlexBlocks | None) -> dict[str, Tensor]:
        copy = Packed(family)
        settings = StepSettings(OBJECTIVE, num_anchors=6, clip_norm=1e9, mixed_precision=False, flex=flex)
        optimizer = torch.optim.SGD(copy.drafter.parameters(), lr=0.0)
        train_step(
            copy.drafter,
            copy.features_of,
            optimizer,
            [copy.batch, copy.alone(0)],
            lambda part: torch.Generator().manual_seed(part),
            1.0,
            settings,
        )
        return {name: parameter.detach() for name, parameter in copy.drafter.named_parameters()}

    dense = step(None)
    assert not stand_in
    learnt = step(FlexBlocks(28, 6, is_compiled=False))
    assert len(stand_in) == 2 * case.drafter.contract.num_layers
    before = dict(case.drafter.named_parameters())
    assert any(not torch.equal(dense[name], before[name]) for name in dense)
    for name, parameter in dense.items():
        assert agree(learnt[name], parameter), name
    with torch.no_grad():
        greedy_drafts(case.drafter, case.features_of, case.features_of(case.batch), case.batch, case.blocks())
    assert len(stand_in) == 2 * case.drafter.contract.num_layers


def test_products_are_bf16_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys come out of a norm in float32, values out of a product in bf16: flex attention wants one dtype."""
    seen = []

    def record(q: Tensor, k: Tensor, v: Tensor, **rest: Any) -> Tensor:
        seen.append((q.dtype, k.dtype, v.dtype, torch.is_autocast_enabled("cpu")))
        return masked_attention(q, k, v, **rest)

    monkeypatch.setattr(flex_module, "flex_attention", record)
    case = Case(tiny_drafter())
    with torch.autocast("cpu", torch.bfloat16):
        dense = draft_blocks(case.drafter, case.taps, case.rows(), case.blocks)
        found = draft_blocks(case.drafter, case.taps, case.rows(), case.blocks, PLAIN)
    assert set(seen) == {(torch.bfloat16,) * 3 + (False,)}
    assert found.dtype == dense.dtype
    torch.testing.assert_close(found, dense, rtol=0.05, atol=0.05)


# --- the real one ---


def compare_attends(
    flex: FlexBlocks,
    context_size: int,
    kind: Any,
    *,
    device: str = "cpu",
    seed: int = 0,
    packed: bool = False,
    dtype: torch.dtype = torch.float32,
) -> float:
    """Largest difference of outputs and, on a GPU, gradients, relative to the largest number."""
    generator, (B, A, Q, N, M, H) = torch.Generator().manual_seed(seed), (2, 9, 4, 6, 2, 64)
    sizes = [(B, A * Q, N, H), (B, A * Q, M, H), (B, A * Q, M, H), (B, context_size, M, H), (B, context_size, M, H)]
    has_gradient = device == "cuda"
    tensors = [torch.randn(size, generator=generator).to(device, dtype).requires_grad_(has_gradient) for size in sizes]
    q, k, v, context_k, context_v = tensors
    anchors = some_anchors(context_size, A, seed=seed).to(device)
    documents = some_documents(context_size).to(device) if packed else None
    dense_mask = block_visibility(anchors, Q, context_size, documents_BS=documents, **kind)
    dense = BlocksOverContext([(context_k, context_v)], [dense_mask])(0, q, k, v)
    attend = flex.over_context([(context_k, context_v)], [(kind["window"], kind["causal"])], anchors, Q, documents)
    assert isinstance(attend, FlexBlocksOverContext)
    found = attend(0, q, k, v)
    assert found.shape == dense.shape and found.dtype == dense.dtype
    pairs = [(dense, found)]
    if has_gradient:
        weights = torch.randn(dense.shape, generator=generator).to(device, dtype)
        both = [torch.autograd.grad(mixed, tensors, weights) for mixed in (dense, found)]
        pairs += list(zip(*both, strict=True))
    assert all(bool(torch.isfinite(other).all()) for _, other in pairs)
    largest = [float(one.abs().max()) for one, _ in pairs]
    return max(
        float((one - other).abs().max()) / (size or 1.0) for (one, other), size in zip(pairs, largest, strict=True)
    )


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Torch compiles a function for a limited number of shapes per process."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.filterwarnings(f"ignore:{EAGER}")
@pytest.mark.usefixtures("fresh_compiler")
@torch.no_grad()
def test_flex_attention_of_a_cpu_agrees() -> None:
    sized = FlexBlocks(129, 9, is_compiled=False)
    for context_size in (1, 127, 128, 129):
        assert compare_attends(sized, context_size, KINDS["full"], seed=context_size) < 1e-5
    assert compare_attends(sized, 100, KINDS["causal-window"], packed=True) < 1e-5


@pytest.mark.slow  # compiles for a minute
@pytest.mark.timeout(600)
@compiled
@pytest.mark.usefixtures("fresh_compiler")
@torch.no_grad()
def test_what_is_compiled_on_a_cpu_is_never_of_an_earlier_batch() -> None:
    run = FlexBlocks(129, 9)
    for seed, context_size in enumerate((129, 1, 127, 128, 129, 129)):
        assert compare_attends(run, context_size, KINDS["full"], seed=seed, packed=True) < 1e-5


# --- on a GPU ---


@pytest.mark.gpu
@pytest.mark.timeout(600)
@compiled
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_outputs_and_gradients_agree_on_a_gpu_at_every_length(dtype: torch.dtype) -> None:
    """One compilation for all lengths of a run, and other anchors in every call."""
    run, limit = FlexBlocks(1000, 9), 1e-4 if dtype == torch.float32 else 0.04
    for seed, context_size in enumerate([*LENGTHS, 1000, 129, 1]):
        assert compare_attends(run, context_size, KINDS["full"], device="cuda", seed=seed, dtype=dtype) < limit


@pytest.mark.gpu
@pytest.mark.timeout(600)
@compiled
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("context_size", LENGTHS)
def test_outputs_and_gradients_agree_on_a_gpu_at_a_size_of_its_own(context_size: int) -> None:
    sized = FlexBlocks(context_size, 9)
    for seed in range(2):
        assert compare_attends(sized, context_size, KINDS["full"], device="cuda", seed=seed) < 1e-4


@pytest.mark.gpu
@pytest.mark.timeout(600)
@compiled
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("packed", [False, True])
def test_every_kind_of_layer_agrees_on_a_gpu(kind: str, packed: bool) -> None:
    for seed in range(2):
        found = compare_attends(FlexBlocks(300, 9), 300, KINDS[kind], device="cuda", seed=seed, packed=packed)
        assert found < 1e-4


@pytest.mark.gpu
@pytest.mark.timeout(600)
@compiled
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("mixed_precision", [False, True])
def test_a_step_learns_the_same_on_a_gpu(mixed_precision: bool) -> None:
    """A whole step with autocast around and a backward behind it; heads of 64, as the kernel wants 16 at least.

    Windows in float32 alone: in bf16 their gradients were wrong, and `attention_choice.py` refuses them.
    """
    device = torch.device("cuda")
    changes: dict[str, Any] = {"num_heads": 2, "num_kv_heads": 1, "head_size": 64}
    if not mixed_precision:
        changes["layer_windows"] = (3, None)

    def step(flex: FlexBlocks | None, *, is_mixed: bool) -> dict[str, Tensor]:
        case = Packed("dflash")
        drafter, target = tiny_drafter(**changes).to(device), case.target.to(device)
        features = type(case.features_of)(target, drafter.contract.target_layer_ids)
        settings = StepSettings(OBJECTIVE, 6, 1e9, is_mixed, flex)
        optimizer = torch.optim.SGD(drafter.parameters(), lr=0.0)
        before = {name: parameter.detach().clone() for name, parameter in drafter.named_parameters()}
        for seed in range(2):
            train_step(
                drafter,
                features,
                optimizer,
                [case.batch],
                lambda part, seed=seed: torch.Generator().manual_seed(seed),
                0.1,
                settings,
            )
        return {name: parameter.detach() - before[name] for name, parameter in drafter.named_parameters()}

    dense, learnt = (step(flex, is_mixed=mixed_precision) for flex in (None, FlexBlocks(28, 6)))
    if not mixed_precision:
        for name, change in dense.items():
            assert float((learnt[name] - change).abs().max()) <= 1e-3 * float(change.abs().max()) + 1e-6, name
        return
    # Gradients of norms are sums that cancel, so in bf16 neither way is near the other; both are as near the truth.
    exact = step(None, is_mixed=False)

    def error(found: dict[str, Tensor]) -> float:
        return math.sqrt(sum(float((found[name] - change).square().sum()) for name, change in exact.items()))

    assert 0 < error(learnt) <= 1.5 * error(dense)
