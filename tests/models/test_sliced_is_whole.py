"""The chain of stages computes what the whole transformers model computes."""

import pytest
import torch
from tiny_models import (
    ARCHITECTURES,
    DROPOUT,
    LAYERS,
    PRECISIONS,
    VOCAB,
    assert_causal_is_whole,
    build_all,
    chain,
    lm_loss,
    named,
    some_ids,
    tiny_source,
    whole_model,
)

from phalanx.models import LoraConfig

FAMILY_NAMES = ("gpt2", "opt", "bloom", "llama", "falcon")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def assert_same_gradients(stages, model):
    whole = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    sliced = {name: p.grad for name, p in named(stages).items() if p.grad is not None}
    assert sliced.keys() == whole.keys()
    for name, gradient in whole.items():
        assert torch.equal(sliced[name], gradient), name


@pytest.mark.quick_cases("*-3-fp32", "gpt2-untied-*")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("num_stages", range(1, LAYERS + 1))
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_loss_and_gradients_are_bit_equal(cache, name, num_stages, precision):
    assert_causal_is_whole(tiny_source(name, cache), num_stages, precision)


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_the_eager_kernel_is_bit_equal_too(cache, name):
    source = tiny_source(name, cache)
    model, stages, ids = whole_model(source, "eager"), build_all(source, 3, attention="eager"), some_ids()

    expected = model(input_ids=ids, labels=ids, use_cache=False)
    expected.loss.backward()
    logits = chain(stages, ids)
    model.loss_function(logits, ids, vocab_size=VOCAB).backward()

    assert torch.equal(logits, expected.logits)
    assert_same_gradients(stages, model)


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_dropout_draws_the_same_numbers_as_the_whole_model(cache, name):
    source = tiny_source(name, cache, **DROPOUT[name])
    model, stages, ids = whole_model(source), build_all(source, 3), some_ids()

    torch.manual_seed(1)
    expected = model(input_ids=ids, use_cache=False).logits
    torch.manual_seed(1)
    first = chain(stages, ids)
    torch.manual_seed(1)
    again = chain(stages, ids)
    torch.manual_seed(2)
    other = chain(stages, ids)

    assert torch.equal(first, expected)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_activation_checkpointing_changes_no_gradient(cache, name):
    source, ids = tiny_source(name, cache, **DROPOUT[name]), some_ids()
    plain, recomputed = build_all(source, 2), build_all(source, 2, recompute=True)

    for stages in (plain, recomputed):
        torch.manual_seed(1)
        lm_loss(chain(stages, ids), ids).backward()

    for (key, left), right in zip(named(plain).items(), named(recomputed).values(), strict=True):
        assert torch.equal(left.grad, right.grad), key


def test_activation_checkpointing_keeps_fewer_tensors(cache):
    source, ids = tiny_source("gpt2", cache), some_ids()
    saved = []
    for recompute in (False, True):
        count = 0

        def pack(tensor):
            nonlocal count
            count += 1
            return tensor

        stages = build_all(source, 1, recompute=recompute)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            chain(stages, ids)
        saved.append(count)

    assert saved[1] < saved[0] / 3


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_adapters_are_bit_equal_to_peft_on_the_whole_model(cache, name):
    peft = pytest.importorskip("peft")
    source, ids = tiny_source(name, cache), some_ids()
    stages = build_all(source, 3, adapter=LoraConfig(rank=4, alpha=8))
    family = stages[0].family
    model = whole_model(source)
    peft.inject_adapter_in_model(
        peft.LoraConfig(
            r=4, lora_alpha=8, target_modules=list(family.facts.adapter_targets), fan_in_fan_out=family.fan_in_fan_out
        ),
        model,
    )
    adapters = {key: value for stage in stages for key, value in stage.trainable_parameters().items()}
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, value in adapters.items():
            value.copy_(torch.randn(value.shape, generator=generator) / 8)
            model.get_parameter(key.replace(".weight", ".default.weight")).copy_(value)

    expected = model(input_ids=ids, use_cache=False).logits
    lm_loss(expected, ids).backward()
    logits = chain(stages, ids)
    lm_loss(logits, ids).backward()

    assert torch.equal(logits, expected)
    for key, value in adapters.items():
        assert torch.equal(value.grad, model.get_parameter(key.replace(".weight", ".default.weight")).grad), key
    assert all(p.grad is None for key, p in named(stages).items() if key not in adapters)


@pytest.mark.parametrize("name", ["gpt2", "opt-post-norm", "bloom", "llama-tied"])
def test_a_tied_head_is_one_weight_counted_once(cache, name):
    stages = build_all(tiny_source(name, cache), 3)
    family = stages[0].family

    assert stages[-1].get_parameter("lm_head.weight") is stages[0].get_parameter(family.embedding_weight)
    assert "lm_head.weight" not in named(stages)
    assert family.embedding_weight in stages[0].trainable_parameters()


@pytest.mark.parametrize("name", ["gpt2-untied", "llama"])
def test_an_untied_head_stays_its_own_weight(cache, name):
    stages = build_all(tiny_source(name, cache), 3)

    assert "lm_head.weight" in stages[-1].trainable_parameters()
    assert stages[-1].get_parameter("lm_head.weight") is not stages[0].get_parameter(stages[0].family.embedding_weight)
