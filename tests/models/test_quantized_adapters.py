"""QLoRA: the frozen matrices in few bits, what is computed with them, and what leaves a run."""

from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from tiny_models import (
    Held,
    build_all,
    chain,
    disturbed,
    edit_config,
    lm_loss,
    named,
    some_ids,
    tiny_source,
    trained,
    whole_model,
)

from phalanx.checkpoint.export import export_model
from phalanx.config import digest_config
from phalanx.config.extras import has_bitsandbytes
from phalanx.data.preferences import PairCorpus, PairRows
from phalanx.errors import ConfigError, ModelError
from phalanx.models import LoraConfig, ModelConfig, ModelSource, StageSpec, build_empty_stage, stage_table
from phalanx.models.adapters.quantized import QuantizedLinear, quantized_layers
from phalanx.train.batches.reference import ReferenceModel

NEEDS_QUANT = pytest.mark.skipif(not has_bitsandbytes(), reason="needs the extra `quant`")
KINDS = ["nf4", "int8"]


def adapter(kind, rank=4):
    return LoraConfig(rank=rank, quantize=kind)


def oracle(matrix, kind):
    """The matrix after it was quantised, as the papers have it."""
    if kind == "int8":
        scale = matrix.abs().amax(dim=1, keepdim=True)
        return torch.round(matrix * (127 / scale)) * scale / 127
    # appendix E of the paper
    below = [-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0]
    above = [0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0]
    code = torch.tensor([*below, *above])
    flat = matrix.flatten()
    blocks = torch.nn.functional.pad(flat, (0, -len(flat) % 64)).view(-1, 64)
    scale = blocks.abs().amax(dim=1, keepdim=True)
    nearest = (blocks / scale.clamp(min=1e-30)).unsqueeze(-1).sub(code).abs().argmin(-1)
    return (code[nearest] * scale).flatten()[: len(flat)].view(matrix.shape)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@NEEDS_QUANT
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(8, 64), (5, 48), (7, 10), (1, 2)])
def test_a_matrix_is_quantised_as_the_papers_say_whatever_its_shape(kind, shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    with torch.device("meta"):
        layer = QuantizedLinear(torch.nn.Linear(shape[1], shape[0]), kind, "w")
    layer = layer.to_empty(device="cpu")

    layer.quantize_values(matrix)

    torch.testing.assert_close(layer.widen_matrix(torch.float32), oracle(matrix, kind), rtol=1e-5, atol=1e-6)


@NEEDS_QUANT
@pytest.mark.parametrize("kind", KINDS)
def test_zeros_stay_zeros_and_what_is_no_number_is_refused(kind):
    with torch.device("meta"):
        layer = QuantizedLinear(torch.nn.Linear(64, 3), kind, "w")
    layer = layer.to_empty(device="cpu")
    layer.quantize_values(torch.zeros(3, 64))

    assert torch.equal(layer.widen_matrix(torch.float32), torch.zeros(3, 64))
    for wrong in (torch.full((3, 64), torch.nan), torch.zeros(64, 3)):
        with pytest.raises(ModelError, match="expected finite numbers"):
            layer.quantize_values(wrong)


@NEEDS_QUANT
@pytest.mark.parametrize("kind", KINDS)
def test_a_matrix_that_the_files_do_not_have_so_wide_takes_no_memory(tmp_path, kind):
    source = tiny_source("llama", tmp_path)
    edit_config(source.directory, intermediate_size=2**40)

    with pytest.raises(ModelError, match=r"gate_proj\.weight' has shape \[48, 32\]; config\.json says \[10995"):
        build_all(ModelSource(source.directory), 2, adapter=adapter(kind))


@NEEDS_QUANT
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_stages_compute_what_lora_computes_beside_the_widened_matrices(cache, name, kind):
    source, ids = tiny_source(name, cache), some_ids()
    found = disturbed(build_all(source, 2, adapter=adapter(kind)), 0.1)
    plain = disturbed(build_all(source, 2, adapter=LoraConfig(rank=4)), 0.1)
    widened = {key: layer for stage in found for key, layer in quantized_layers(stage).items()}
    for key, value in named(plain).items():
        if key in widened:
            matrix = widened[key].widen_matrix(torch.float32)
            value.detach().copy_(matrix.T if name == "gpt2" else matrix)

    logits, expected = chain(found, ids), chain(plain, ids)
    lm_loss(logits, ids).backward()
    lm_loss(expected, ids).backward()

    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-6)
    for key, value in trained(plain).items():
        torch.testing.assert_close(trained(found)[key].grad, value.grad, rtol=1e-4, atol=1e-7)
    # every matrix of the blocks, and nothing else
    assert len(widened) == 4 * (7 if name == "llama" else 4)
    assert not torch.allclose(expected, chain(build_all(source, 2), ids), atol=1e-3)


@NEEDS_QUANT
def test_products_in_bf16_are_those_of_a_matrix_in_bf16(cache):
    source, ids = tiny_source("llama", cache), some_ids()
    (stage,) = build_all(source, 1, adapter=adapter("nf4"))

    with torch.autocast("cpu", dtype=torch.bfloat16):
        narrow = stage(ids).float()
    lm_loss(narrow, ids).backward()

    wide = stage(ids)
    assert 0 < float((narrow - wide).detach().norm() / wide.detach().norm()) < 0.02
    assert all(bool(torch.isfinite(value.grad).all()) for value in trained([stage]).values())


@NEEDS_QUANT
@pytest.mark.parametrize("kind", KINDS)
def test_a_stage_without_weights_takes_the_same_bytes_and_computes_the_same_bits(cache, kind):
    source, ids = tiny_source("llama", cache), some_ids()
    (mine,) = build_all(source, 1, adapter=adapter(kind))
    theirs = build_empty_stage(
        source.hub_config_dict,
        StageSpec(0, 1, 0, 4),
        adapter=adapter(kind),
        activation_checkpointing=False,
        attention="sdpa",
    )

    assert bool(theirs(ids).isnan().all())
    for name, value in mine.all_parameters().items():
        theirs.all_parameters()[name].detach().copy_(value)

    assert torch.equal(theirs(ids), mine(ids))


@NEEDS_QUANT
def test_a_stage_table_counts_the_bytes_that_are_kept(cache):
    source = tiny_source("llama", cache)
    rows = {kind: stage_table(source.hub_config, (StageSpec(0, 1, 0, 4),), adapter(kind))[0] for kind in (None, "int8")}
    matrices = sum(
        layer.inputs * layer.outputs
        for layer in quantized_layers(build_all(source, 1, adapter=adapter("int8"))[0]).values()
    )

    assert rows["int8"].parameters == rows[None].parameters
    assert rows["int8"].trainable == rows[None].trainable
    saved = rows[None].size_bytes - rows["int8"].size_bytes
    # a scale for each of 4 * (32 + 16 + 16 + 32 + 48 + 48 + 32) outputs
    assert saved == 3 * matrices - 4 * 4 * 224


# peft asks transformers in a way that transformers will drop
@pytest.mark.filterwarnings("ignore")
@NEEDS_QUANT
def test_an_adapter_is_exported_for_peft_and_merged_into_weights_that_are_whole(cache, tmp_path):
    peft = pytest.importorskip("peft")
    source, ids = tiny_source("llama", cache), some_ids()
    stages = disturbed(build_all(source, 2, adapter=adapter("nf4")), 0.1)
    plain = build_all(source, 2, adapter=LoraConfig(rank=4))
    for name, value in trained(plain).items():
        value.detach().copy_(trained(stages)[name])

    export_model(Held(stages), source, tmp_path / "adapter", adapter=adapter("nf4"))
    export_model(Held(stages), source, tmp_path / "merged", adapter=adapter("nf4"), merge=True)

    adapted = peft.PeftModel.from_pretrained(whole_model(source), str(tmp_path / "adapter")).eval()
    with torch.no_grad():
        torch.testing.assert_close(adapted(ids).logits, chain(plain, ids), rtol=1e-4, atol=1e-5)
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert not [name for name, value in merged.items() if not value.is_floating_point() or "absmax" in name]


def test_the_key_changes_no_older_digest_and_dora_is_refused():
    assert "quantize" not in LoraConfig(rank=4).model_dump()
    assert digest_config(adapter("nf4")) != digest_config(LoraConfig(rank=4))
    assert ModelConfig(path="a", adapter=adapter("int8")).base_quantization == "int8"
    for wrong in ({"quantize": "nf4", "dora": True}, {"quantize": "fp4"}, {"kind": "ptuning", "quantize": "nf4"}):
        with pytest.raises(ValidationError):
            ModelConfig.model_validate({"path": "a", "adapter": wrong})


def test_without_the_package_nothing_is_built(cache, monkeypatch):
    monkeypatch.setattr("phalanx.config.extras.has_bitsandbytes", lambda: False)

    with pytest.raises(
        ConfigError, match=r"needs bitsandbytes, which is not installed; install phalanx-train\[quant\]"
    ):
        build_all(tiny_source("llama", cache), 1, adapter=adapter("nf4"))


@NEEDS_QUANT
def test_an_odd_number_of_inputs_is_refused_where_two_share_a_byte():
    with (
        torch.device("meta"),
        pytest.raises(ModelError, match=r'has 7 inputs, nf4 packs pairs; take quantize = "int8"'),
    ):
        QuantizedLinear(torch.nn.Linear(7, 4), "nf4", "w")


@NEEDS_QUANT
def test_what_preferences_are_measured_from_is_the_quantised_base(cache):
    source, ids = tiny_source("llama", cache), some_ids()
    corpus = PairCorpus(PairRows(ids, ids, {}), PairRows(ids, ids, {}), 61, 0, Path("tokenizer.json"), "00")
    plain, packed = (ReferenceModel(source, "sdpa", 5, quantize=kind) for kind in (None, "nf4"))

    assert torch.equal(
        packed.read_stage(StageSpec(0, 1, 0, 4))(ids), chain(build_all(source, 1, adapter=adapter("nf4")), ids)
    )
    assert packed.content_digest(corpus) != plain.content_digest(corpus)
