"""LoRA: what is trained, its names and its first values."""

import hashlib
import math
import sys

import pytest
import torch
from tiny_models import build_all, chain, lm_loss, named, some_ids, tiny_source
from torch import nn
from transformers.initialization import no_init_weights

from phalanx.errors import ModelError
from phalanx.models import LoraConfig
from phalanx.models.adapters import draw_adapter


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def adapters(stages):
    return {name: value for stage in stages for name, value in stage.trainable_parameters().items()}


@pytest.mark.parametrize("name", ["gpt2", "opt", "bloom", "llama"])
def test_first_values_do_not_depend_on_the_layout(cache, name):
    source = tiny_source(name, cache)
    torch.manual_seed(0)
    one = adapters(build_all(source, 1, adapter=LoraConfig()))
    torch.manual_seed(1)
    four = adapters(build_all(source, 4, adapter=LoraConfig()))
    other = adapters(build_all(source, 4, adapter=LoraConfig(), seed=6))

    assert one.keys() == four.keys() == other.keys()
    for key, value in one.items():
        assert torch.equal(value, four[key])
        assert torch.equal(value, other[key]) == key.endswith("lora_B.weight")


def test_names_are_those_of_the_layer_and_the_matrix(cache):
    stages = build_all(tiny_source("gpt2", cache), 2, adapter=LoraConfig(rank=2))

    assert sorted(stages[1].trainable_parameters()) == [
        "transformer.h.2.attn.c_attn.lora_A.weight",
        "transformer.h.2.attn.c_attn.lora_B.weight",
        "transformer.h.3.attn.c_attn.lora_A.weight",
        "transformer.h.3.attn.c_attn.lora_B.weight",
    ]
    assert "transformer.h.2.attn.c_attn.weight" in stages[1].all_parameters()
    assert stages[1].trainable_parameters()["transformer.h.2.attn.c_attn.lora_B.weight"].shape == (96, 2)


def test_a_is_drawn_within_the_bounds_of_kaiming_and_b_is_zero(cache):
    values = adapters(build_all(tiny_source("llama", cache), 2, adapter=LoraConfig(rank=16)))
    a = torch.cat([v.detach().flatten() for name, v in values.items() if "lora_A" in name])

    assert float(a.abs().max()) <= 1 / math.sqrt(32)
    assert float(a.std()) == pytest.approx(1 / math.sqrt(3 * 32), rel=0.05)
    assert all(not v.any() for name, v in values.items() if "lora_B" in name)


@pytest.mark.parametrize("width", [7, 16, 576, 1536])
def test_a_has_the_bits_of_torchs_kaiming_uniform(width):
    drawn, expected = torch.empty(4, width), torch.empty(4, width)
    draw_adapter("layer.lora_A.weight", drawn, 7)
    first_bytes = hashlib.sha256(b"7|layer.lora_A.weight").digest()[:8]
    generator = torch.Generator().manual_seed(int.from_bytes(first_bytes, "big"))

    nn.init.kaiming_uniform_(expected, a=math.sqrt(5), generator=generator)

    assert torch.equal(drawn, expected)


@pytest.mark.parametrize("matrix", ["lora_A", "lora_B"])
def test_values_are_drawn_while_another_thread_has_switched_torchs_initialisers_off(matrix):
    drawn, expected = torch.full((4, 16), torch.nan), torch.full((4, 16), torch.nan)
    draw_adapter(f"layer.{matrix}.weight", expected, 7)

    with no_init_weights():
        draw_adapter(f"layer.{matrix}.weight", drawn, 7)

    assert torch.equal(drawn, expected)


@pytest.mark.parametrize("name", ["gpt2", "opt", "bloom", "llama"])
def test_a_fresh_adapter_changes_nothing_and_then_learns(cache, name):
    source, ids = tiny_source(name, cache), some_ids()
    stages = build_all(source, 2, adapter=LoraConfig(rank=4))
    frozen = {key: value.clone() for key, value in named(stages).items() if not value.requires_grad}

    assert torch.equal(chain(stages, ids), chain(build_all(source, 2), ids))
    optimizer = torch.optim.AdamW(adapters(stages).values(), lr=0.01)
    losses = []
    for _ in range(10):
        loss = lm_loss(chain(stages, ids), ids)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    assert losses[-1] < losses[0]
    assert all(torch.equal(value, named(stages)[key]) for key, value in frozen.items())


def test_checkpointing_adapters_changes_no_gradient(cache):
    source, ids, adapter = tiny_source("gpt2", cache), some_ids(), LoraConfig(dropout=0.3)
    gradients = []
    for recompute in (False, True):
        stages = build_all(source, 2, adapter=adapter, recompute=recompute)
        torch.manual_seed(4)
        lm_loss(chain(stages, ids), ids).backward()
        gradients.append([value.grad for value in adapters(stages).values()])

    assert all(torch.equal(left, right) for left, right in zip(*gradients, strict=True))


def test_targets_may_name_any_linear_layer(cache):
    stages = build_all(tiny_source("gpt2", cache), 1, adapter=LoraConfig(targets=("mlp.c_proj", "c_fc")))

    assert {name.split(".", 3)[3] for name in adapters(stages)} == {
        "mlp.c_fc.lora_A.weight",
        "mlp.c_fc.lora_B.weight",
        "mlp.c_proj.lora_A.weight",
        "mlp.c_proj.lora_B.weight",
    }


@pytest.mark.parametrize("target", ["q_proj", "lm_head", "proj", "wte"])
def test_a_target_that_is_no_linear_layer_of_a_block_is_refused(cache, target):
    with pytest.raises(ModelError, match=f"found '{target}'; the linear layers of gpt2 are attn.c_attn, attn.c_proj"):
        build_all(tiny_source("gpt2", cache), 2, adapter=LoraConfig(targets=(target,)))


def test_without_peft_the_extra_is_named(cache, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)

    with pytest.raises(ModelError, match=r"needs peft, which is not installed; install phalanx-train\[lora\]"):
        build_all(tiny_source("gpt2", cache), 2, adapter=LoraConfig())
