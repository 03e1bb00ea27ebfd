"""From a name to a model: agreement with transformers, strict files, and drafters that fit or are refused."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.tiny import tiny_drafter, tiny_prompts, tiny_target, wrap_target
from tests.tiny_run import write_drafter, write_target_folder, write_tokenizer
from tests.unit.models.probing import PROBE, old_format
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor

from paceline.checkpoint.contract import RopeSettings, TargetLayerId
from paceline.checkpoint.tokenizer import TextTokenizer
from paceline.errors import CheckpointError, CompatibilityError, ConfigError
from paceline.models import loading
from paceline.models.attends import WholeSequence
from paceline.models.building import initialise_drafter
from paceline.models.layers import Linear
from paceline.models.loading import LoadedTarget, load_drafter, load_target, resolve_device
from paceline.ops.native.build import has_amx
from paceline.ops.native.rows import can_run

SIZES = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": None,
}


def hugging_face(family: str, folder: Path, *, max_shard_size: str = "1GB", **changes: Any) -> Any:
    """A random model of transformers, saved by transformers, with a tokenizer."""
    import transformers

    torch.manual_seed(5)
    config_class = {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}[family]
    model_class = {"llama": transformers.LlamaForCausalLM, "qwen3": transformers.Qwen3ForCausalLM}[family]
    model = model_class(config_class(**(SIZES | changes))).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:  # gains of 1 and biases of 0 would hide a mix-up
                parameter.add_(torch.randn(parameter.shape) * 0.2)
            else:
                parameter.mul_(6.0 if "embed" in name else 5.0)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    write_tokenizer(folder, 512)
    return model


def logits_of(target: LoadedTarget, ids: Tensor) -> Tensor:
    positions = torch.arange(ids.shape[1]).expand(ids.shape)
    return target.model.logits(target.model(ids, positions, WholeSequence()))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}}),
        ("qwen3", {"tie_word_embeddings": False}),
        ("qwen3", {"tie_word_embeddings": True, "head_dim": 32, "attention_bias": True}),
    ],
)
def test_a_saved_model_loads_and_agrees(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    model = hugging_face(family, tmp_path / "m", **changes)
    target = load_target(str(tmp_path / "m"), dtype="float32", device="cpu", linear_mode="plain")
    ids = torch.tensor(tiny_prompts([33, 33]))
    with torch.no_grad():
        theirs = model(ids).logits
    ours = logits_of(target, ids)
    assert float(theirs.std()) > 0.5
    assert float((ours - theirs).abs().max()) < 1e-4 * float(theirs.std())
    assert not any(parameter.requires_grad for parameter in target.model.parameters())
    assert target.contract.stop_token_ids == (2,) and not target.model.training
    assert target.tokenizer.encode("w5 w7") == [5, 7]


def test_shards_load_like_one_file(tmp_path: Path) -> None:
    model = hugging_face("llama", tmp_path / "m", max_shard_size="60KB")
    assert len(list((tmp_path / "m").glob("model-*.safetensors"))) > 2
    assert (tmp_path / "m" / "model.safetensors.index.json").is_file()
    target = load_target(str(tmp_path / "m"), dtype="float32", device="cpu", linear_mode="plain")
    ids = torch.tensor(tiny_prompts([20]))
    with torch.no_grad():
        torch.testing.assert_close(logits_of(target, ids), model(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_target_folder(tmp_path / "target", tiny_target())


def change_weights(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda t: t.pop("model.layers.2.mlp.up_proj.weight"), "1 missing tensors: model.layers.2.mlp.up_proj.weight"),
        (lambda t: t.update(extra=torch.zeros(2)), "1 unused tensors: extra"),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(63)}),
            r"1 misshapen tensors: model.norm.weight is \[63\], expected \[64\]",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.k_proj.weight": torch.zeros(64, 64)}),
            r"k_proj.weight is \[64, 64\], expected \[32, 64\]",
        ),
        (
            lambda t: t["model.layers.1.mlp.down_proj.weight"][3].fill_(float("nan")),
            "NaN or infinity: model.layers.1.mlp.down_proj.weight",
        ),
    ],
)
def test_a_tensor_that_does_not_belong_is_named(
    folder: Path, change: Callable[[dict[str, Tensor]], object], text: str
) -> None:
    change_weights(folder, change)
    with pytest.raises(CheckpointError, match=text):
        load_target(str(folder), dtype="float32", device="cpu")


def test_a_truncated_file_is_said(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match="truncated"):
        load_target(str(folder), dtype="float32", device="cpu")


def test_dtype_device_and_arithmetic(folder: Path) -> None:
    auto = load_target(str(folder), device="cpu")
    is_native = can_run(torch.empty(1, dtype=torch.bfloat16)) and not has_amx()
    assert auto.linear_mode == ("native" if is_native else "packed"), "what a CPU serves with unless told otherwise"
    half = load_target(str(folder), dtype="bfloat16", device="cpu", linear_mode="row_invariant")
    assert half.linear_mode == "row_invariant"
    assert {parameter.dtype for parameter in half.model.parameters()} == {torch.bfloat16}
    assert half.model.position_table.dtype == torch.float32, "positions stay exact whatever the weights are"
    modes = {module.mode for module in half.model.modules() if isinstance(module, Linear)}
    assert modes == {"row_invariant"}


@pytest.mark.parametrize("index", [0, 128, 256, 2**70], ids=["next", "negative in 8 bits", "0 in 8 bits", "no number"])
@pytest.mark.parametrize("count", [0, 1])
def test_a_gpu_that_is_not_there(index: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(ConfigError, match=f"torch sees {count} GPUs"):
        resolve_device(f"cuda:{max(index, count)}")
    assert resolve_device("cpu") == torch.device("cpu")


def test_an_untrained_drafter_depends_on_its_seed_alone() -> None:
    contract = tiny_drafter(tiny_target().contract).contract
    cpu = torch.device("cpu")
    torch.manual_seed(1)
    first = initialise_drafter(contract, cpu, seed=4)
    torch.manual_seed(2)
    second, other = initialise_drafter(contract, cpu, seed=4), initialise_drafter(contract, cpu, seed=5)
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter, second.get_parameter(name)) and parameter.requires_grad
        assert parameter.dtype == torch.float32
        if parameter.dim() == 1:
            assert bool((parameter == 1).all())
        else:
            assert float(parameter.detach().std()) == pytest.approx(0.02, rel=0.1)
            assert not torch.equal(parameter, other.get_parameter(name))


@pytest.fixture
def target() -> LoadedTarget:
    return wrap_target(tiny_target(), "plain")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_drafter_loads_in_the_targets_precision(tmp_path: Path, target: LoadedTarget, dtype: torch.dtype) -> None:
    """The fingerprint, recorded in float32, is replayed in either."""
    folder = write_drafter(tmp_path / "d", target)
    served = wrap_target(tiny_target().to(dtype), "plain")
    loaded = load_drafter(str(folder), served)
    assert loaded.num_draft_tokens == 7 and loaded.contract.target_layer_ids == (0, 1, 2)
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {dtype}
    assert load_drafter(str(folder), served, num_draft_tokens=3).num_draft_tokens == 3
    weights = loaded.model.checkpoint_parameters()
    for name, parameter in tiny_drafter(target.contract).checkpoint_parameters().items():
        assert torch.equal(weights[name], parameter.to(dtype)), name


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda t: t.pop("fc_norm.1.weight"), "1 missing tensors: fc_norm.1.weight"),
        (lambda t: t.update({"extra.weight": torch.zeros(2)}), "1 unused tensors: extra.weight"),
        (lambda t: t.update({"lm_head.weight": torch.zeros(2)}), r"lm_head.weight is \[2\], expected \[512, 64\]"),
        (lambda t: t.update({"fc.weight": torch.zeros(64, 128)}), r"fc.weight is \[64, 128\], expected \[64, 192\]"),
    ],
)
def test_drafter_tensors_that_do_not_belong_are_named(
    tmp_path: Path, target: LoadedTarget, change: Callable[[dict[str, Tensor]], object], text: str
) -> None:
    folder = write_drafter(tmp_path / "d", target)
    change_weights(folder, change)
    with pytest.raises(CheckpointError, match=text):
        load_drafter(str(folder), target)


def test_a_drafter_of_another_target_is_refused_once_with_every_reason(tmp_path: Path, target: LoadedTarget) -> None:
    other = wrap_target(tiny_target(hidden_size=32, vocab_size=256, num_layers=8), "plain")
    folder = write_drafter(tmp_path / "d", other, target_layer_ids=tuple(map(TargetLayerId, (1, 4, 6))))
    with pytest.raises(CompatibilityError) as caught:
        load_drafter(str(folder), target)
    message = caught.value.message
    assert "taps of width 32" in message and "hidden_size is 64" in message
    assert "256 token ids, this one has 512" in message
    assert "8 layers, this one has 4" in message and "taps [4, 6]" in message
    assert caught.value.origin["target"] == "tests/tiny-llama"


@pytest.mark.parametrize(
    ("changes", "drafter_changes", "text"),
    [
        ({"hidden_size": 32}, {}, "the target's hidden_size is 64"),
        ({"vocab_size": 256}, {}, "256 token ids, this one has 512"),
        ({"num_layers": 6}, {"target_layer_ids": (TargetLayerId(1), TargetLayerId(4))}, r"taps \[4\]"),
    ],
)
def test_each_disagreement_alone(
    tmp_path: Path, target: LoadedTarget, changes: dict[str, Any], drafter_changes: dict[str, Any], text: str
) -> None:
    folder = write_drafter(tmp_path / "d", wrap_target(tiny_target(**changes), "plain"), **drafter_changes)
    with pytest.raises(CompatibilityError, match=text):
        load_drafter(str(folder), target)


def test_a_layout_that_this_family_does_not_draft_is_refused(tmp_path: Path, target: LoadedTarget) -> None:
    """Served as fill-in it would run, one position off, and accept next to nothing."""
    folder = write_drafter(tmp_path / "d", target)
    config = json.loads((folder / "config.json").read_text())
    config["dflash_config"]["sample_from_anchor"] = True
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CompatibilityError, match=r"'anchor_sampling'.*'fill_in'") as caught:
        load_drafter(str(folder), target)
    assert str(folder) in caught.value.origin["drafter"]


def test_too_many_draft_tokens_are_refused(tmp_path: Path, target: LoadedTarget) -> None:
    folder = write_drafter(tmp_path / "d", target)
    with pytest.raises(ConfigError, match="8 draft tokens per step were asked for"):
        load_drafter(str(folder), target, num_draft_tokens=8)


def test_an_edited_tap_is_named(tmp_path: Path, target: LoadedTarget) -> None:
    folder = write_drafter(tmp_path / "d", target, target_layer_ids=(TargetLayerId(0), TargetLayerId(2)))
    config = json.loads((folder / "config.json").read_text())
    config["dflash_config"]["target_layer_ids"] = [0, 1]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CompatibilityError, match="it matches layer 2, the config says 1"):
        load_drafter(str(folder), target)
    load_drafter(str(folder), target, check_fingerprint=False)


@pytest.mark.parametrize("name", ["fc_norm.0.weight", "hidden_norm.weight"])
def test_altered_norms_are_found(tmp_path: Path, target: LoadedTarget, name: str) -> None:
    folder = write_drafter(tmp_path / "d", target)
    change_weights(folder, lambda tensors: tensors[name].add_(1.0))
    with pytest.raises(CompatibilityError, match=r"(normed taps|context features) differ"):
        load_drafter(str(folder), target)


def test_other_weights_are_refused(tmp_path: Path, target: LoadedTarget) -> None:
    folder = write_drafter(tmp_path / "d", target)
    with pytest.raises(CompatibilityError, match="no layer of this target matches"):
        load_drafter(str(folder), wrap_target(tiny_target(seed=8), "plain"))


def test_without_a_fingerprint_it_warns(tmp_path: Path, target: LoadedTarget, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_drafter(tmp_path / "d", target, fingerprint=False)
    with caplog.at_level(logging.WARNING, logger=loading.__name__):
        load_drafter(str(folder), target)
    assert "no fingerprint" in caplog.text and str(folder) in caplog.text


def templated(target: LoadedTarget, template: str | None) -> LoadedTarget:
    backend = Tokenizer(WordLevel({"a": 0}, unk_token="a"))
    tokenizer = TextTokenizer(backend, chat_template=template, special_tokens={}, origin="test")
    return dataclasses.replace(target, tokenizer=tokenizer)


def test_another_template_than_in_training_is_warned_of(
    tmp_path: Path, target: LoadedTarget, caplog: pytest.LogCaptureFixture
) -> None:
    """Both hashes are said; a drafter that names no template, or this one, loads in silence."""
    folder = write_drafter(tmp_path / "d", target)
    trained = templated(target, "{{ messages }}")
    history = folder / "provenance.json"
    record = json.loads(history.read_text()) if history.exists() else {}
    for template, is_warned in ((None, False), (trained.tokenizer.template_sha256, True)):
        history.write_text(json.dumps({**record, "chat_template_sha256": template}))
        for served, differs in (("{{ messages }}", False), ("{{ messages }} ", True), (None, True)):
            caplog.clear()
            with caplog.at_level(logging.WARNING, logger=loading.__name__):
                load_drafter(str(folder), templated(target, served))
            assert ("was trained on chats of the template" in caplog.text) == (is_warned and differs)
    assert str(template)[:12] in caplog.text and "renders them with none" in caplog.text


def test_the_drafters_own_rope_reaches_its_table(tmp_path: Path, target: LoadedTarget) -> None:
    folder = write_drafter(tmp_path / "d", target, rope=RopeSettings(theta=500.0))
    loaded = load_drafter(str(folder), target)
    wanted = tiny_drafter(target.contract, rope=RopeSettings(theta=500.0)).backbone.position_table
    assert torch.equal(loaded.model.backbone.position_table, wanted)
    assert not torch.equal(wanted, tiny_drafter(target.contract).backbone.position_table)


def edit_config(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("family", "change", "text"),
    [
        ("dflash", lambda c: c.update(rms_norm_eps=1e-6), "rms_norm_eps 1e-05, the config says 1e-06"),
        (
            "dflash",
            lambda c: c["dflash_config"].update(input_embedding_scale=1.03),
            "input_embedding_scale 1.0, the con",
        ),
        (
            "dflash",
            lambda c: c["dflash_config"].update(output_multiplier=1.03),
            "output_multiplier 1.0, the config says",
        ),
        ("dflash", lambda c: c.update(max_position_embeddings=500), "max_position_embeddings 512, the config says 500"),
        (
            "dflash",
            lambda c: c.update(layer_types=["sliding_attention"] * 2, sliding_window=4096, use_sliding_window=True),
            r"layer_windows \[None, None\], the config says \[4096, 4096\]",
        ),
        ("dflash", lambda c: c["dflash_config"].update(final_logit_softcapping=1e4), "final_logit_softcapping None"),
        ("dflash2", lambda c: c["dflash_config"].update(selector_top_k=7), "selector.top_k 6, the config says 7"),
    ],
)
def test_a_field_that_no_number_shows_is_held_against_the_record(
    tmp_path: Path, target: LoadedTarget, family: Any, change: Callable[[dict[str, Any]], object], text: str
) -> None:
    folder = write_drafter(tmp_path / "d", target, family=family)
    load_drafter(str(folder), target)
    edit_config(folder, change)
    with pytest.raises(CompatibilityError, match=text) as caught:
        load_drafter(str(folder), target)
    assert str(folder / "config.json") in str(caught.value)
    assert caught.value.hint is not None and "config" in caught.value.hint


def test_a_fingerprint_of_format_1_warns_of_what_it_does_not_cover(
    tmp_path: Path, target: LoadedTarget, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_drafter(tmp_path / "d", target)
    drafter = load_drafter(str(folder), target).model
    old = {name: tensor.contiguous() for name, tensor in old_format(target.model, drafter, PROBE).items()}
    save_file(old, folder / "fingerprint.safetensors")
    with caplog.at_level(logging.WARNING, logger=loading.__name__):
        load_drafter(str(folder), target)
    assert "format 1" in caplog.text and "RoPE, mask row" in caplog.text and "paceline check" in caplog.text


def test_native_arithmetic_is_refused_where_there_is_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="native"):
        load_target(str(folder), dtype="float32", device="cpu", linear_mode="native")
    monkeypatch.setattr(loading, "can_run_native", lambda _weight: False)
    with pytest.raises(ConfigError, match="native"):
        load_target(str(folder), dtype="bfloat16", device="cpu", linear_mode="native")
    half = load_target(str(folder), dtype="bfloat16", device="cpu")
    assert half.linear_mode in ("packed", "plain"), "auto goes without"


def test_native_arithmetic_has_to_be_asked_for_where_there_is_amx(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "has_amx", lambda: True)
    assert load_target(str(folder), dtype="bfloat16", device="cpu").linear_mode in ("packed", "plain")
    if can_run(torch.empty(1, dtype=torch.bfloat16)):
        asked = load_target(str(folder), dtype="bfloat16", device="cpu", linear_mode="native")
        assert asked.linear_mode == "native"
