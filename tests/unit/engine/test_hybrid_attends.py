"""The forms of latent attention over blocks agree with each other and with contiguous rows, whatever lies around."""

from __future__ import annotations

import pytest
import torch
from tests.caches import CPU, fixed_tables, scattered_tables
from torch import Tensor

from paceline.engine.block_tables import BlockTables
from paceline.engine.hybrid_attends import LatentBatched, LatentForm, LatentPerRequest
from paceline.engine.latent_cache import LatentCache
from paceline.models.hybrid import LatentHeads
from paceline.models.layers import LinearMode
from paceline.ops.multi_head_latent_attention import explicit_latent_attention

HEADS, OWN, SHARED, LATENT, VALUE = 3, 8, 4, 12, 6


def heads(mode: LinearMode = "plain") -> LatentHeads:
    generator = torch.Generator().manual_seed(0)
    key, value = (torch.randn(HEADS, size, LATENT, generator=generator) for size in (OWN, VALUE))
    return LatentHeads(key, value, (OWN + SHARED) ** -0.5, mode)


def random_rows(slot: int, length: int) -> tuple[Tensor, Tensor]:
    """Queries and latent rows of a text, [1, length, ...]."""
    generator = torch.Generator().manual_seed(slot + 1)
    q = torch.randn(1, length, HEADS, OWN + SHARED, generator=generator)
    return q, torch.randn(1, length, LATENT + SHARED, generator=generator)


def expected(slot: int, length: int, num_rows: int) -> Tensor:
    q, rows = random_rows(slot, length)
    own = heads()
    return explicit_latent_attention(q[:, -num_rows:], rows, own.key_NPR, own.value_NVR, visible=None)


def run(tables: BlockTables, starts: dict[int, int], num_rows: int, form: str) -> Tensor:
    """Attend over rows of which those below each start are cached; everything else in the cache is NaN."""
    cache = LatentCache(tables, num_layers=2, width=LATENT + SHARED, dtype=torch.float32, device=CPU)
    cache.poison_blocks(range(1, tables.num_blocks))
    texts = {slot: random_rows(slot, start + num_rows) for slot, start in starts.items()}
    for slot, start in starts.items():
        if start:
            cache.writer(tables.rows(slot, 0, start).unsqueeze(0))(1, texts[slot][1][:, :start])
    slots_B, starts_B = torch.tensor(list(starts)), torch.tensor(list(starts.values()))
    attend: LatentForm
    if form == "batched":
        attend = LatentBatched(cache, slots_B, starts_B, num_rows)
    else:
        is_exact = form == "row_invariant"
        attend = LatentPerRequest(cache, list(starts), list(starts.values()), num_rows, is_row_invariant=is_exact)
    q, rows = (torch.cat([text[part][:, -num_rows:] for text in texts.values()]) for part in (0, 1))
    return attend(1, q, rows, heads("row_invariant" if form == "row_invariant" else "plain"))


@pytest.mark.parametrize("make_tables", [fixed_tables, scattered_tables], ids=["one run", "scattered"])
@pytest.mark.parametrize("form", ["batched", "per_request", "row_invariant"])
@pytest.mark.parametrize("num_rows", [1, 4])
def test_every_form_attends_over_the_rows_of_its_own_request(make_tables, form: str, num_rows: int) -> None:
    starts = {1: 0, 0: 13, 2: 7}
    found = run(make_tables(3, 24), starts, num_rows, form)
    right = torch.cat([expected(slot, start + num_rows, num_rows) for slot, start in starts.items()])
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)


def test_a_long_chunk_is_expanded_and_agrees() -> None:
    starts = {0: 40}
    found = run(scattered_tables(1, 176), starts, 130, "per_request")
    torch.testing.assert_close(found, expected(0, 170, 130), rtol=1e-5, atol=1e-5)


def test_row_invariant_bits_do_not_depend_on_company_or_chunks() -> None:
    whole = run(fixed_tables(1, 24), {0: 0}, 16, "row_invariant")
    for start, num_rows in ((15, 1), (12, 4), (8, 8)):
        company = run(scattered_tables(3, 24), {2: 3, 0: start, 1: 9}, num_rows, "row_invariant")
        if num_rows + start == 16:
            assert torch.equal(company[1], whole[0, start:])
