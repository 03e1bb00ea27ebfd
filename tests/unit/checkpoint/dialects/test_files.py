"""Folders: own tables, vocabulary map, mask file, and tensors of another family."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from tests.unit.checkpoint.dialects.conftest import load_golden, tiny_tensors
from torch import Tensor

from paceline.checkpoint.contract import DrafterContract
from paceline.checkpoint.dialects import read_draft_to_target, read_drafter, read_drafter_contract, read_mask_embedding
from paceline.checkpoint.weights import open_safetensors
from paceline.errors import CheckpointError

GoldenFolder = Callable[..., Path]
Make = Callable[..., DrafterContract]


class Tables:
    """A source of a few tensors."""

    origin = "tables"

    def __init__(self, **tensors: Tensor) -> None:
        self.tensors = tensors

    def names(self) -> list[str]:
        return list(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def load(self, name: str) -> Tensor:
        return self.tensors[name]


def marks(size: int, ids: list[int]) -> Tensor:
    return torch.zeros(size, dtype=torch.bool).index_fill_(0, torch.tensor(ids), True)


def test_worked_example_of_the_vocabulary_table(make_drafter: Make) -> None:
    """Ids 2, 5, 7 are stored as offsets 2, 4, 5: draft id 1 is 5, and would be 4 if the table were read as absolute."""
    contract = make_drafter(draft_vocab_size=3, target_vocab_size=8)
    offsets = torch.tensor([2, 4, 5])
    for tables in (Tables(d2t=offsets), Tables(d2t=offsets, t2d=marks(8, [2, 5, 7])), Tables(d2t=offsets.int())):
        table = read_draft_to_target(tables, contract)
        assert table is not None and table.tolist() == [2, 5, 7] and table.dtype == torch.int64
        assert int(table[1]) == 5 != int(offsets[1])


def test_report_b20(make_drafter: Make) -> None:
    """Offsets 3, 9, 9, 497 are the ids 3, 10, 11, 500."""
    contract = make_drafter(draft_vocab_size=4, target_vocab_size=512)
    table = read_draft_to_target(Tables(d2t=torch.tensor([3, 9, 9, 497])), contract)
    assert table is not None and table.tolist() == [3, 10, 11, 500]
    with pytest.raises(CheckpointError, match="do not ascend inside the target's 512"):
        read_draft_to_target(Tables(d2t=torch.tensor([3, 9, 9, 509])), contract)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        (Tables(), "have no d2t"),
        (Tables(d2t=torch.tensor([2, 4])), r"d2t is torch.int64 \[2\], expected integers \[3\]"),
        (Tables(d2t=torch.tensor([2.0, 4.0, 5.0])), "expected integers"),
        (Tables(d2t=torch.tensor([2, 5, 7]), t2d=marks(8, [2, 5, 7])), "d2t is absolute"),
        (Tables(d2t=torch.tensor([2, 5, 7])), "do not ascend inside the target's 8"),  # 2 + 7 is beyond
        (Tables(d2t=torch.tensor([2, 4, 5]), t2d=marks(8, [2, 5, 6])), "t2d marks 3 ids"),
        (Tables(d2t=torch.tensor([2, 4, 5]), t2d=marks(8, [2, 5])), "t2d marks 2 ids"),
        (Tables(d2t=torch.tensor([2, 4, 5]), t2d=marks(9, [2, 5, 7])), r"t2d is \[9\], expected \[8\]"),
        (Tables(d2t=torch.tensor([5, 4, 3])), "do not ascend"),
        (Tables(d2t=torch.tensor([-1, 4, 5])), "do not ascend"),
    ],
)
def test_vocabulary_tables_that_are_refused(make_drafter: Make, tables: Tables, message: str) -> None:
    contract = make_drafter(draft_vocab_size=3, target_vocab_size=8)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_draft_to_target(tables, contract)
    assert caught.value.origin == {"weights": "tables", "config": contract.origin}
    if "t2d" not in tables.tensors and tables.tensors.get("d2t", torch.tensor([0])).tolist() == [2, 5, 7]:
        assert "look like target ids" in str(caught.value)


@given(ids=st.sets(st.integers(0, 99), min_size=2, max_size=40))
def test_offsets_round_trip_and_absolute_tables_never_pass_beside_t2d(ids: set[int]) -> None:
    from tests.unit.checkpoint.conftest import DRAFTER

    chosen = torch.tensor(sorted(ids))
    contract = _sized(DRAFTER, len(ids))
    offsets = chosen - torch.arange(len(ids))
    table = read_draft_to_target(Tables(d2t=offsets, t2d=marks(100, sorted(ids))), contract)
    assert table is not None and table.equal(chosen)
    # the planted fault: an absolute table, unless the ids start at 0 without a gap, where both readings are one
    if not chosen.equal(torch.arange(len(ids))) and not offsets.equal(chosen):
        with pytest.raises(CheckpointError, match="d2t"):
            read_draft_to_target(Tables(d2t=chosen, t2d=marks(100, sorted(ids))), contract)


@pytest.mark.parametrize(
    ("values", "target_vocab_size"),
    [
        (list(range(64)), 128),  # the ids 0 to 63 themselves, which offsets would turn into every second id
        (list(range(0, 190, 3)), 512),
        (list(range(5, 37)), 128),
        (list(range(100, 116)), 256),
        ([0, 5], 128),
        (list(range(0, 128, 2)), 512),
    ],
)
def test_an_absolute_table_is_refused_without_t2d_too(
    make_drafter: Make, values: list[int], target_vocab_size: int
) -> None:
    """Report B20: values that rise at every step and from 0, or over a length at which no vocabulary has gaps only."""
    contract = make_drafter(draft_vocab_size=len(values), target_vocab_size=target_vocab_size)
    read_as_offsets = [value + index for index, value in enumerate(values)]
    assert read_as_offsets[-1] < target_vocab_size, "both readings are possible"
    with pytest.raises(CheckpointError, match="d2t looks absolute") as caught:
        read_draft_to_target(Tables(d2t=torch.tensor(values)), contract)
    shown = str(caught.value)
    for reading in (values, read_as_offsets):
        assert f"[{', '.join(map(str, reading[:4]))}" in shown
    assert "storing d2t - arange(draft_vocab_size)" in shown and "t2d" in shown
    # with t2d to tell, the same values are read as what they are
    table = read_draft_to_target(
        Tables(d2t=torch.tensor(values), t2d=marks(target_vocab_size, read_as_offsets)), contract
    )
    assert table is not None and table.tolist() == read_as_offsets
    with pytest.raises(CheckpointError, match="d2t is absolute"):
        read_draft_to_target(Tables(d2t=torch.tensor(values), t2d=marks(target_vocab_size, values)), contract)


@pytest.mark.parametrize(
    "ids",
    [[3, 10, 11, 500], [2, 5, 7], [0, 1, 2, 3], [0, 1, 9], [7], [*range(20), 40, 300], [*range(0, 60, 2), 61, 62]],
)
def test_offsets_without_t2d_are_read(make_drafter: Make, ids: list[int]) -> None:
    """Short tables written by hand may rise throughout; long ones hold neighbouring ids somewhere."""
    contract = make_drafter(draft_vocab_size=len(ids), target_vocab_size=512)
    table = read_draft_to_target(Tables(d2t=torch.tensor(ids) - torch.arange(len(ids))), contract)
    assert table is not None and table.tolist() == ids


def test_report_b20_in_a_folder(golden_folder: GoldenFolder) -> None:
    tensors = tiny_tensors("specforge-eagle3")
    tensors["d2t"] = torch.arange(64)
    del tensors["t2d"]
    with pytest.raises(CheckpointError, match="d2t looks absolute"):
        read_drafter(golden_folder("specforge-eagle3", tensors=tensors))


def _sized(contract: DrafterContract, draft_vocab_size: int) -> DrafterContract:
    import dataclasses

    return dataclasses.replace(contract, draft_vocab_size=draft_vocab_size, target_vocab_size=100)


def test_a_full_vocabulary_needs_no_table_and_takes_an_empty_one(make_drafter: Make) -> None:
    contract = make_drafter()
    assert read_draft_to_target(Tables(), contract) is None
    unpruned = Tables(d2t=torch.zeros(64, dtype=torch.int64), t2d=torch.ones(64, dtype=torch.bool))
    assert read_draft_to_target(unpruned, contract) is None
    with pytest.raises(CheckpointError, match="the draft vocabulary is the target's, 64 ids"):
        read_draft_to_target(Tables(d2t=torch.arange(64)), contract)


def test_a_folder_without_its_table_is_refused(golden_folder: GoldenFolder) -> None:
    """Report B19: the table has to be in the weights."""
    tensors = tiny_tensors("specforge-eagle3")
    del tensors["d2t"], tensors["t2d"]
    with pytest.raises(CheckpointError, match="proposes from 64 of 128 ids, and the weights have no d2t"):
        read_drafter(golden_folder("specforge-eagle3", tensors=tensors))


def test_own_tables_follow_the_file(golden_folder: GoldenFolder) -> None:
    """Report B23: what the drafter ships is its own, what it does not ship is lent."""
    tensors = tiny_tensors("zlab-dflash")
    assert not read_drafter(golden_folder("zlab-dflash")).contract.has_own_embedding
    tensors["embed_tokens.weight"] = torch.randn(128, 32)
    contract = read_drafter(golden_folder("zlab-dflash", tensors=tensors)).contract
    assert contract.has_own_embedding and not contract.has_own_head
    tensors["lm_head.weight"] = torch.randn(128, 32)
    contract = read_drafter(golden_folder("zlab-dflash", tensors=tensors)).contract
    assert contract.has_own_embedding and contract.has_own_head
    config = load_golden("zlab-dflash") | {"has_own_lm_head": True}
    with pytest.raises(CheckpointError, match="has_own_lm_head is true, and the weights have no lm_head"):
        read_drafter(golden_folder("zlab-dflash", config=config))
    tied = load_golden("zlab-dflash") | {"tie_word_embeddings": True}
    del tensors["lm_head.weight"]
    with pytest.raises(CheckpointError, match="tie_word_embeddings is true"):
        read_drafter(golden_folder("zlab-dflash", config=tied, tensors=tensors))


@pytest.mark.parametrize(
    ("name", "place"),
    [("zlab-dflash", None), ("speculators-dflash2", None), ("speculators-dflash2", "transformer_layer_config")],
)
def test_a_tie_must_be_one(golden_folder: GoldenFolder, name: str, place: str | None) -> None:
    """Said to be one and stored twice with other numbers, or once, is a contradiction; nothing stored is none."""
    config, tensors = load_golden(name), tiny_tensors(name)
    (config if place is None else config[place])["tie_word_embeddings"] = True
    contract = read_drafter(golden_folder(name, config=config, tensors=tensors)).contract
    assert not contract.has_own_embedding and not contract.has_own_head
    embedding = torch.randn(128, 32)
    for stored in ("embed_tokens.weight", "lm_head.weight"):
        with pytest.raises(CheckpointError, match="tie_word_embeddings is true, and the weights have an"):
            read_drafter_contract(golden_folder(name, config=config, tensors={**tensors, stored: embedding}))
    both = {**tensors, "embed_tokens.weight": embedding, "lm_head.weight": embedding.clone()}
    assert read_drafter(golden_folder(name, config=config, tensors=both)).contract.has_own_head
    both["lm_head.weight"][3, 4] += 1
    with pytest.raises(CheckpointError, match=r"an lm_head \[128, 32\] that is not equal"):
        read_drafter(golden_folder(name, config=config, tensors=both))
    (config if place is None else config[place])["tie_word_embeddings"] = "yes"
    with pytest.raises(CheckpointError, match="tie_word_embeddings is 'yes'"):
        read_drafter(golden_folder(name, config=config, tensors=both))


def test_a_tie_cannot_be_one_over_a_reduced_vocabulary(golden_folder: GoldenFolder) -> None:
    config = load_golden("speculators-eagle3") | {"tie_word_embeddings": True}
    for read in (read_drafter, read_drafter_contract):
        with pytest.raises(CheckpointError, match="an embedding of 128 rows and an lm_head of 64"):
            read(golden_folder("speculators-eagle3", config=config))


def test_without_weights_the_config_is_believed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(load_golden("zlab-dflash") | {"has_own_lm_head": True}))
    assert read_drafter_contract(tmp_path).has_own_head
    with pytest.raises(CheckpointError, match=r"has neither model\.safetensors"):
        read_drafter(tmp_path)


@pytest.mark.parametrize("as_dict", [False, True])
@pytest.mark.parametrize("name", ["zlab-dflash", "zlab-dflash2"])
def test_mask_embedding(golden_folder: GoldenFolder, name: str, as_dict: bool) -> None:
    folder = golden_folder(name)
    row = torch.randn(1, 32, dtype=torch.bfloat16)
    torch.save({"embedding": row, "mask_token_id": 126} if as_dict else row, folder / "mask_embedding.pt")
    files = read_drafter(folder)
    assert files.contract.has_mask_embedding and read_drafter_contract(folder).has_mask_embedding
    assert files.mask_embedding is not None and files.mask_embedding.equal(row.flatten())


class Code:
    """Something that a pickle may name and `weights_only` must not build."""


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"embedding": torch.zeros(32), "mask_token_id": 5}, "for mask_token_id 5, the config says 126"),
        ({"embedding": torch.zeros(32), "scale": 2.0}, "unknown keys scale"),
        ({"mask_token_id": 126}, "holds NoneType"),
        (torch.zeros(31), r"\[31\], expected 32 numbers"),
        (torch.zeros(32, dtype=torch.int64), "expected a float tensor"),
        (torch.full((32,), float("nan")), "NaN or infinity"),
        (["a"], "holds list"),
        (Code(), "cannot be read as tensors"),
    ],
)
def test_mask_embeddings_that_are_refused(golden_folder: GoldenFolder, content: Any, message: str) -> None:
    folder = golden_folder("zlab-dflash")
    torch.save(content, folder / "mask_embedding.pt")
    with pytest.raises(CheckpointError, match=message):
        read_drafter(folder)


def test_a_damaged_mask_file(golden_folder: GoldenFolder) -> None:
    folder = golden_folder("zlab-dflash")
    contract = read_drafter_contract(folder)
    (folder / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match="cannot be read as tensors"):
        read_mask_embedding(folder / "mask_embedding.pt", contract)
    (folder / "mask_embedding.pt").write_bytes(b"not a pickle at all")
    with pytest.raises(CheckpointError, match="cannot be read as tensors"):
        read_drafter(folder)


@pytest.mark.parametrize("name", ["deepspec-dspark", "kimi-dspark", "specforge-eagle3"])
def test_other_families_have_no_mask_file(golden_folder: GoldenFolder, name: str) -> None:
    folder = golden_folder(name)
    torch.save(torch.zeros(32), folder / "mask_embedding.pt")
    for read in (read_drafter, read_drafter_contract):
        with pytest.raises(CheckpointError, match="reads the vocabulary's own row"):
            read(folder)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("zlab-dflash", "mask_hidden", "mask_hidden, which is P-EAGLE's"),
        ("speculators-eagle3", "mask_hidden", "mask_hidden, which is P-EAGLE's"),
        (
            "zlab-dflash",
            "candidate_selector.predecessor_codebook",
            "candidate_selector, and the config describes a DFlash",
        ),
        ("zlab-dflash", "layers.0.attention_conv.base_kernel", "attention_conv"),
        (
            "zlab-dflash",
            "markov_head.markov_w1.weight",
            "markov_head, and the config describes a DFlash drafter without",
        ),
        ("zlab-dflash", "lilicorr.output_norm.weight", "LiLiCorr"),
        ("zlab-dflash", "xpress_head.w1.weight", "XPress"),
        ("zlab-dflash", "refiner_head.readout.weight", "XPress"),
        ("zlab-dflash", "prefix_gru.weight_ih_l0", "Domino"),
        ("zlab-dflash", "logit_head.prefix_gru.weight_ih_l0", "Domino"),
        ("zlab-dflash", "fc_norm.0.weight", "fc_norm, and the config"),
        ("zlab-dflash", "aux_hidden_norms.0.weight", "Laguna"),
        ("zlab-dflash", "layers.0.self_attn.g_proj.weight", "g_proj"),
        ("zlab-dflash", "layers.0.self_attn.attention_sink_bias", "attention_sink_bias"),
        ("zlab-dflash", "layers.0.self_attn.kv_a_proj_with_mqa.weight", "kv_a_proj_with_mqa"),
        ("deepspec-dflash", "confidence_head.proj.weight", "confidence_head, and the config"),
        ("speculators-eagle3", "layers.0.self_attn.q_norm.weight", "q_norm, and the config"),
        ("deepspec-eagle3", "input_norm.weight", "input_norm, and the config"),
    ],
)
def test_tensors_that_the_config_does_not_describe(
    golden_folder: GoldenFolder, name: str, tensor: str, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_drafter(golden_folder(name, tensors={**tiny_tensors(name), tensor: torch.zeros(3)}))


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("zlab-dflash2", "candidate_selector"),
        ("zlab-dflash2", "attention_conv"),
        ("zlab-dflash2", "mlp_conv"),
        ("deepspec-dspark", "markov_head"),
        ("deepspec-dspark", "confidence_head"),
        ("kimi-dspark", "kv_a_proj_with_mqa"),
        ("kimi-dspark-attn-res", "fc_norm"),
        ("speculators-eagle3", "input_norm"),
        ("deepspec-eagle3", "q_norm"),
        ("zlab-dflash-sinks", "attention_sink_bias"),
    ],
)
def test_parts_that_the_weights_lack(golden_folder: GoldenFolder, name: str, part: str) -> None:
    tensors = {key: value for key, value in tiny_tensors(name).items() if part not in key.split(".")}
    with pytest.raises(CheckpointError, match=rf"with {part}.*the weights do not have it"):
        read_drafter(golden_folder(name, tensors=tensors))


def test_a_dflash2_file_under_dflashs_name_and_the_reverse(golden_folder: GoldenFolder) -> None:
    """Pitfall P21: told apart by the architecture string, cross-checked with keys and with tensors, both ways."""
    plain = load_golden("zlab-dflash2") | {"architectures": ["DFlashDraftModel"]}
    with pytest.raises(CheckpointError, match="belongs to DFlash2"):
        read_drafter(golden_folder("zlab-dflash2", config=plain))
    for key in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
        del plain["dflash_config"][key]
    with pytest.raises(CheckpointError, match="the weights have candidate_selector"):
        read_drafter(golden_folder("zlab-dflash2", config=plain))
    other = load_golden("zlab-dflash2")
    with pytest.raises(CheckpointError, match="with candidate_selector"):
        read_drafter(golden_folder("zlab-dflash2", config=other, tensors=tiny_tensors("zlab-dflash")))


def test_copies_of_the_target_are_ignored(golden_folder: GoldenFolder) -> None:
    extra = {"verifier_norm.weight": torch.ones(32), "verifier_lm_head.weight": torch.ones(4, 32)}
    extra |= {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    tensors = {**tiny_tensors("speculators-eagle3"), **extra}
    files = read_drafter(golden_folder("speculators-eagle3", tensors=tensors))
    assert files.ignored == {*extra, "d2t", "t2d"}


def test_missing_and_damaged_folders(tmp_path: Path, golden_folder: GoldenFolder) -> None:
    for read in (read_drafter, read_drafter_contract):
        with pytest.raises(CheckpointError, match="does not exist"):
            read(tmp_path / "nowhere")
        with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
            read(tmp_path)
    folder = golden_folder("zlab-dflash")
    with pytest.raises(CheckpointError, match="is not a folder"):
        read_drafter(folder / "config.json")
    (folder / "config.json").write_text('{"architectures": ')
    with pytest.raises(CheckpointError, match="is not valid JSON"):
        read_drafter(folder)


def test_shards_are_read_as_one(golden_folder: GoldenFolder) -> None:
    folder = golden_folder("zlab-dflash")
    tensors = tiny_tensors("zlab-dflash")
    (folder / "model.safetensors").unlink()
    halves = [dict(list(tensors.items())[:9]), dict(list(tensors.items())[9:])]
    weight_map = {}
    for number, half in enumerate(halves):
        save_file(half, folder / f"model-{number}.safetensors")
        weight_map |= dict.fromkeys(half, f"model-{number}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert set(read_drafter(folder).source.names()) == set(open_safetensors(folder).names()) == set(tensors)
