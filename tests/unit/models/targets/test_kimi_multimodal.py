"""The multimodal wrapper: media in place of placeholders, the text model's answers, and a tower of known formulas."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as functional
from tests.tiny_kimi import MEDIA_ID, k3_tiny_config, kimi_target, multimodal_config, multimodal_target
from torch import Tensor

from paceline.checkpoint.contract import CaptureId
from paceline.errors import RequestError, ShapeError
from paceline.models.attends import WholeSequence
from paceline.models.taps import TapCollector
from paceline.models.targets.kimi_multimodal import KimiMultimodalTarget
from paceline.models.targets.kimi_vision import Grid, VisionBlock, frame_waves, turn_pairs, turning_angles

IMAGE: Grid = (1, 4, 6)  # 24 patches, 6 rows
CLIP: Grid = (3, 2, 4)  # 24 patches, 2 rows: frames are averaged


@pytest.fixture(scope="module")
def target() -> KimiMultimodalTarget:
    return multimodal_target()


def pixels(*grids: Grid) -> Tensor:
    count = sum(math.prod(grid) for grid in grids)
    return torch.randn(count, 3, 2, 2, generator=torch.Generator().manual_seed(1))


def test_rows_of_each_item(target: KimiMultimodalTarget) -> None:
    image, clip = target.embed_media(pixels(IMAGE, CLIP), [IMAGE, CLIP])
    assert image.shape == (6, 128) and clip.shape == (2, 128)
    batched = target.embed_media(pixels(IMAGE, CLIP).view(2, 24, 3, 2, 2), [IMAGE, CLIP])
    assert torch.equal(batched[0], image) and torch.equal(batched[1], clip)


def test_items_do_not_see_each_other(target: KimiMultimodalTarget) -> None:
    both = target.embed_media(pixels(IMAGE, CLIP), [IMAGE, CLIP])
    alone = target.embed_media(pixels(IMAGE, CLIP)[:24], [IMAGE])
    torch.testing.assert_close(both[0], alone[0], rtol=0, atol=1e-5)
    other = pixels(IMAGE, CLIP)
    other[24:] += 1.0
    torch.testing.assert_close(target.embed_media(other, [IMAGE, CLIP])[0], alone[0], rtol=0, atol=1e-5)


def test_media_take_the_place_of_placeholders_in_order(target: KimiMultimodalTarget) -> None:
    media = target.embed_media(pixels(IMAGE, CLIP), [IMAGE, CLIP])
    ids = torch.arange(5, 19)[None].clone()
    ids[0, 2:8], ids[0, 10:12] = MEDIA_ID, MEDIA_ID
    rows = target.embed_prompt(ids, media)[0]
    assert torch.equal(rows[2:8], media[0]) and torch.equal(rows[10:12], media[1])
    is_text = ids[0] != MEDIA_ID
    assert torch.equal(rows[is_text], target.embed(ids[0, is_text]))
    hidden = target(ids, ids, WholeSequence(), embeddings_BTD=rows[None])
    plain = target(ids, ids, WholeSequence())
    torch.testing.assert_close(hidden[0, :2], plain[0, :2], rtol=0, atol=1e-4)
    assert bool(((hidden - plain)[0, 2:].abs().amax(-1) > 1e-2).all())
    taps = TapCollector([CaptureId(0)])
    target(ids, ids, WholeSequence(), taps, embeddings_BTD=rows[None])
    assert torch.equal(taps.collected()[0][0], rows), "the stream begins with what was injected"


def test_the_tokenizers_placeholder_outranks_the_configs(target: KimiMultimodalTarget) -> None:
    media = target.embed_media(pixels(CLIP), [CLIP])
    ids = torch.tensor([[4, 77, 77, 5]])
    rows = target.embed_prompt(ids, media, media_token_id=77)
    assert torch.equal(rows[0, 1:3], media[0])
    with pytest.raises(RequestError, match="the prompt has 0 placeholders for media, and its 1 items have 2 rows"):
        target.embed_prompt(ids, media)
    assert torch.equal(target.embed_prompt(ids, []), target.embed(ids))


def test_text_through_the_wrapper_is_the_text_models(target: KimiMultimodalTarget) -> None:
    """Features too: a capture that lands on a wrapper must be a capture of what it wraps."""
    text, ids = kimi_target(k3_tiny_config()), torch.arange(9)[None]
    for stream in ("prefix", "attn_res"):
        inner, outer = (TapCollector([CaptureId(2), CaptureId(4), CaptureId(5)], stream) for _ in range(2))
        expected = text.logits(text(ids, ids, WholeSequence(), inner))
        assert torch.equal(target.logits(target(ids, ids, WholeSequence(), outer)), expected)
        for one, other in zip(inner.collected(), outer.collected(), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("grid", [(1, 3, 4), (1, 4, 5)])
def test_grids_that_do_not_divide_are_refused(grid: Grid, target: KimiMultimodalTarget) -> None:
    with pytest.raises(ShapeError, match="multiples of 2 rows and 2 columns"):
        target.embed_media(pixels(grid), [grid])


def test_pixels_and_grids_must_agree(target: KimiMultimodalTarget) -> None:
    with pytest.raises(ShapeError, match=r"pixels has shape \[24, 3, 2, 2\], expected \[48, 3, edge, edge\]"):
        target.embed_media(pixels(IMAGE), [IMAGE, CLIP])
    with pytest.raises(ShapeError, match="at most 4 frames"):
        target.embed_media(pixels((5, 2, 2)), [(5, 2, 2)])


# The tower's parts against formulas.


def test_patches_are_placed_on_the_learned_grid(target: KimiMultimodalTarget) -> None:
    embed = target.vision_tower.patch_embed
    full = embed._places((1, 6, 8)).view(6, 8, 24)
    assert torch.equal(full, embed.grid)
    half = embed._places((1, 3, 4)).view(3, 4, 24)  # each place is the mean of the four that it covers
    torch.testing.assert_close(half, embed.grid.view(3, 2, 4, 2, 24).mean((1, 3)))
    clip = embed._places((3, 6, 8)).view(3, 6, 8, 24)
    waves = frame_waves(3, 24, torch.device("cpu"))
    torch.testing.assert_close(clip, embed.grid + waves[:, None, None])
    expected = [math.sin(2 / 10_000 ** (2 * i / 24)) for i in range(12)]
    torch.testing.assert_close(waves[2, :12], torch.tensor(expected), rtol=0, atol=1e-5)
    torch.testing.assert_close(waves[0], torch.tensor([0.0] * 12 + [1.0] * 12))


def test_channel_pairs_turn_by_column_and_row_in_turn() -> None:
    """As complex numbers; frames of a clip are turned alike."""
    angles = turning_angles([(1, 2, 3), (2, 1, 2)], 8, torch.device("cpu"))
    rates = [1.0, 10_000.0**-0.5]
    places = [(row, column) for row in range(2) for column in range(3)] + [(0, 0), (0, 1)] * 2
    expected = [[place[1 - pair % 2] * rates[pair // 2] for pair in range(4)] for place in places]
    torch.testing.assert_close(angles, torch.tensor(expected))
    x = torch.randn(10, 3, 8)
    as_complex = torch.view_as_complex(x.unflatten(-1, (4, 2)).contiguous())
    turned = torch.view_as_real(as_complex * torch.polar(torch.ones(10, 1, 4), angles[:, None])).flatten(-2)
    torch.testing.assert_close(turn_pairs(x, angles), turned)


def test_a_block_against_its_formula(target: KimiMultimodalTarget) -> None:
    block = target.vision_tower.blocks[0]
    assert isinstance(block, VisionBlock)
    x, angles = torch.randn(12, 24), turning_angles([(1, 2, 4), (1, 2, 2)], 16, torch.device("cpu"))
    found = block(x, angles, [8, 4])

    def norm(rows: Tensor, gain: Tensor) -> Tensor:
        return rows * (rows.square().mean(-1, keepdim=True) + 2**-7) ** -0.5 * gain

    qkv = (norm(x, block.norm0.weight) @ block.wqkv.weight.t()).view(12, 3, 2, 16)
    q, k, v = turn_pairs(qkv[:, 0], angles), turn_pairs(qkv[:, 1], angles), qkv[:, 2]
    mixed = torch.zeros(12, 2, 16)
    for item in (slice(0, 8), slice(8, 12)):
        for head in range(2):
            weights = (q[item, head] @ k[item, head].t() / 4).softmax(-1)
            mixed[item, head] = weights @ v[item, head]
    y = x + mixed.flatten(1) @ block.wo.weight.t()
    inner = functional.gelu(norm(y, block.norm1.weight) @ block.fc0.weight.t(), approximate="tanh")
    torch.testing.assert_close(found, y + inner @ block.fc1.weight.t(), rtol=0, atol=1e-5)


def test_merging_puts_neighbours_side_by_side_and_averages_frames(target: KimiMultimodalTarget) -> None:
    rows = torch.randn(2 * 4 * 6, 24)
    merged = target.vision_tower._merge(rows, (2, 4, 6))
    frames = rows.view(2, 4, 6, 24)
    expected = [
        torch.cat([frames[:, 2 * down + i, 2 * across + j].mean(0) for i in (0, 1) for j in (0, 1)])
        for down in range(2)
        for across in range(3)
    ]
    torch.testing.assert_close(merged, torch.stack(expected))


def test_the_projector_norms_behind_its_products(target: KimiMultimodalTarget) -> None:
    projector, rows = target.mm_projector, torch.randn(5, 96)
    y = functional.gelu(rows @ projector.linear_1.weight.t()) @ projector.linear_2.weight.t()
    y = y * (y.square().mean(-1, keepdim=True) + 1e-5) ** -0.5 * projector.post_norm.weight
    torch.testing.assert_close(projector(rows), y, rtol=0, atol=1e-4)


def test_biases_where_the_config_has_them() -> None:
    options = {"attn_bias": True, "linear_bias": True, "patch_embed_proj_bias": True}
    with_bias = multimodal_target(multimodal_config(vision_config=options))
    names = {name.rpartition(".")[0] for name, _ in with_bias.named_parameters() if name.endswith(".bias")}
    parts = {f"vision_tower.blocks.{layer}.{part}" for layer in (0, 1) for part in ("wqkv", "wo", "fc0", "fc1")}
    assert names == parts | {"vision_tower.patch_embed.proj"}
    assert with_bias.embed_media(pixels(IMAGE), [IMAGE])[0].shape == (6, 128)
