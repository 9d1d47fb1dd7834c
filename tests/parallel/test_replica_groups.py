"""Groups of ranks that are replicas of each other: what they tell each other, and how often."""

from types import SimpleNamespace

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import OffloadPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore

from phalanx.parallel.control.pipelining import accumulate_gradients
from phalanx.parallel.data.data_parallel import shard_module

MICROBATCHES = 4


@pytest.fixture
def four_ranks():
    """Of which this process is one; what it sends goes nowhere."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    dist.destroy_process_group()


class Layer(nn.Linear):
    """Takes what rows say of their attention, as a rank's part does."""

    def forward(self, x, seen):
        del seen
        return super().forward(x)


@pytest.mark.parametrize("zero", [2, 3])
def test_groups_sum_gradients_once_a_step_each_rank_its_part(four_ranks, monkeypatch, zero):
    layer, summed, real = Layer(8, 8), [], dist.all_reduce
    shard_module(layer, four_ranks, reshard=zero == 3, policy=OffloadPolicy())
    monkeypatch.setattr(dist, "all_reduce", lambda x, *args, **keys: summed.append(x.numel()) or real(x, *args, **keys))
    domain = SimpleNamespace(config=SimpleNamespace(zero=zero))
    step = accumulate_gradients(layer, domain, MICROBATCHES, lambda y, wanted: (y - wanted).sum())

    for _ in range(2):
        step(torch.zeros(8, 8), torch.zeros(8, 8), None)

    assert summed == [(8 * 8 + 8) // 2] * 2
