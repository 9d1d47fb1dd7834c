"""What holds for every adapter that is no low-rank one, whatever it trains."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import build_all, chain, disturbed, lm_loss, some_ids, tiny_source, trained

from phalanx.models import PrefixConfig, SpfConfig

PREFIX = PrefixConfig(kind="ptuning", tokens=5)
SPF = SpfConfig(kind="spf", share=0.5)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize(("name", "adapter", "size"), [("bloom", PREFIX, 1.0), ("gpt2", SPF, 0.1), ("llama", SPF, 0.1)])
def test_a_saved_adapter_comes_back_bit_for_bit_in_another_layout(cache, name, adapter, size, tmp_path):
    source, ids = tiny_source(name, cache), some_ids()
    stages = disturbed(build_all(source, 2, adapter=adapter), size)
    save_file({key: value.detach() for key, value in trained(stages).items()}, tmp_path / "adapter.safetensors")

    again = build_all(source, 4, adapter=adapter, seed=77)
    saved = load_file(tmp_path / "adapter.safetensors")
    for key, value in trained(again).items():
        value.detach().copy_(saved[key])

    assert trained(again).keys() == saved.keys()
    assert torch.equal(chain(again, ids), chain(stages, ids))


@pytest.mark.parametrize(("name", "adapter"), [("gpt2", PREFIX), ("llama", SPF)])
def test_checkpointing_changes_no_gradient(cache, name, adapter):
    source, ids = tiny_source(name, cache), some_ids()
    gradients = []
    for recompute in (False, True):
        stages = build_all(source, 2, adapter=adapter, recompute=recompute)
        lm_loss(chain(stages, ids), ids).backward()
        gradients.append([value.grad for value in trained(stages).values()])

    assert all(torch.equal(left, right) for left, right in zip(*gradients, strict=True))
