"""P-tuning v2: virtual tokens are what transformers makes of a cache with the same keys and values, and peft too."""

import pytest
import torch
from pydantic import ValidationError
from tiny_models import Held, build_all, chain, disturbed, lm_loss, named, some_ids, tiny_source, trained, whole_model
from transformers import DynamicCache

from phalanx.checkpoint.export import export_model
from phalanx.config import digest_config
from phalanx.errors import CheckpointError, ConfigError, ModelError
from phalanx.models import LoraConfig, ModelConfig, PrefixConfig, SpfConfig, stage_table
from phalanx.testing.tiny import tiny_run

FAMILIES = ["gpt2", "opt", "bloom", "llama"]
VARIANTS = [(name, "sdpa") for name in (*FAMILIES, "opt-post-norm")] + [("gpt2", "eager"), ("bloom-odd-heads", "eager")]
FIVE = PrefixConfig(kind="ptuning", tokens=5)
STRONG = 1.0
"""Virtual tokens that one cannot miss."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def with_cache(source, stages, ids):
    """Logits of transformers' whole model behind the same keys and values."""
    model, past = whole_model(source).eval(), DynamicCache()
    path = f"{source.family.trunk}.{source.family.blocks}"
    values = trained(stages)
    for layer in range(source.num_layers):
        pair = [values[f"{path}.{layer}.prefix.{part}"].detach() for part in ("key", "value")]
        past.update(*(one.expand(len(ids), -1, -1, -1) for one in pair), layer)
    with torch.no_grad():
        return model(ids, past_key_values=past).logits


@pytest.mark.parametrize(("name", "attention"), VARIANTS)
def test_virtual_tokens_are_what_transformers_makes_of_a_cache(cache, name, attention):
    source, ids = tiny_source(name, cache), some_ids()
    stages = disturbed(build_all(source, 2, adapter=FIVE, attention=attention), STRONG)

    found = chain(stages, ids)

    torch.testing.assert_close(found, with_cache(source, stages, ids), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found, chain(build_all(source, 2), ids), atol=1e-2)


@pytest.mark.parametrize("name", FAMILIES)
def test_exactly_the_keys_and_values_are_trained_and_all_of_them_learn(cache, name):
    source, ids = tiny_source(name, cache), some_ids()
    stages = build_all(source, 2, adapter=FIVE)
    frozen = {key: value.clone() for key, value in named(stages).items() if not value.requires_grad}
    path = f"{source.family.trunk}.{source.family.blocks}"

    optimizer = torch.optim.AdamW(trained(stages).values(), lr=0.05)
    losses = []
    for _ in range(6):
        loss = lm_loss(chain(stages, ids), ids)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    assert set(trained(stages)) == {f"{path}.{i}.prefix.{part}" for i in range(4) for part in ("key", "value")}
    assert all(value.grad.abs().amax(dim=(0, 2)).min() > 0 for value in trained(stages).values())
    assert losses[-1] < losses[0]
    assert all(torch.equal(value, named(stages)[key]) for key, value in frozen.items())


def test_first_values_depend_on_seed_and_name_alone(cache):
    source = tiny_source("llama", cache)
    one, four = (trained(build_all(source, n, adapter=FIVE)) for n in (1, 4))
    other = trained(build_all(source, 4, adapter=FIVE, seed=6))

    assert one.keys() == four.keys() == other.keys()
    assert all(torch.equal(value, four[key]) and not torch.equal(value, other[key]) for key, value in one.items())
    # grouped heads: two of keys and values, four of queries
    assert {tuple(value.shape) for value in one.values()} == {(2, 5, 8)}
    assert float(torch.cat([value.detach().flatten() for value in one.values()]).std()) == pytest.approx(0.02, rel=0.1)


def test_virtual_tokens_take_positions_of_a_model_that_has_few(cache):
    stages = build_all(tiny_source("gpt2", cache), 1, adapter=FIVE)

    assert chain(stages, some_ids(seq=19)).shape[1] == 19
    with pytest.raises(ModelError, match="a sequence of 25 tokens, 5 of them virtual; the model has 24 pos"):
        chain(stages, some_ids(seq=20))


# peft asks transformers in a way that transformers will drop
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["gpt2", "opt", "llama"])
def test_virtual_tokens_are_exported_for_peft(cache, name, tmp_path):
    peft = pytest.importorskip("peft")
    source, ids = tiny_source(name, cache), some_ids()
    stages = disturbed(build_all(source, 2, adapter=FIVE), STRONG)

    export_model(Held(stages), source, tmp_path / "adapter", adapter=FIVE)

    adapted = peft.PeftModel.from_pretrained(whole_model(source), str(tmp_path / "adapter")).eval()
    with torch.no_grad():
        torch.testing.assert_close(adapted(ids).logits, chain(stages, ids), rtol=1e-4, atol=1e-5)
    with pytest.raises(CheckpointError, match="virtual tokens are not weights"):
        export_model(Held(stages), source, tmp_path / "merged", adapter=FIVE, merge=True)


def test_a_run_file_chooses_the_kind_and_lora_needs_none():
    def read(adapter):
        return ModelConfig.model_validate({"path": "a", "adapter": adapter}).adapter

    assert read({"kind": "spf", "share": 0.25}) == SpfConfig(kind="spf", share=0.25)
    assert read({"kind": "ptuning"}) == PrefixConfig(kind="ptuning", tokens=16)
    assert read({"rank": 4}) == read({"kind": "lora", "rank": 4}) == LoraConfig(rank=4)
    assert digest_config(LoraConfig(rank=4)) != digest_config(SpfConfig(kind="spf"))
    for wrong in ({"kind": "ia3"}, {"kind": "spf", "rank": 4}, {"kind": "spf", "share": 0.0}):
        with pytest.raises(ValidationError):
            read(wrong)


def test_the_verified_pipeline_refuses_rows_that_are_chosen_by_weights():
    with pytest.raises(ValidationError, match=r'\[pipeline\] excludes model\.adapter\.kind = "spf"'):
        tiny_run(adapter=SpfConfig(kind="spf"))


def test_an_engine_that_builds_stages_without_weights_says_so():
    with pytest.raises(ConfigError, match=r'model\.adapter\.kind = "spf": its rows are chosen by weights'):
        _ = ModelConfig(path="a", adapter=SpfConfig(kind="spf")).sliced_adapter
    assert ModelConfig(path="a", adapter=FIVE).sliced_adapter == FIVE
    assert ModelConfig(path="a").sliced_adapter is None


@pytest.mark.parametrize(("adapter", "expected"), [(FIVE, 4 * 2 * 5 * 32), (SpfConfig(kind="spf"), 4 * 32 * (48 + 64))])
def test_what_is_trained_is_counted_without_memory_for_it(cache, adapter, expected):
    source = tiny_source("gpt2", cache)
    stages = build_all(source, 2, adapter=adapter)

    rows = stage_table(source.hub_config, tuple(stage.spec for stage in stages), adapter)

    assert [row.trainable for row in rows] == [
        sum(v.numel() for v in stage.trainable_parameters().values()) for stage in stages
    ]
    assert sum(row.trainable for row in rows) == expected
