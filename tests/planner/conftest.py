"""Models and machines that the planner's tests share; none of them is built."""

import pytest

from phalanx.planner.cluster.hardware import Cluster, Device, Pool
from phalanx.planner.cluster.links import Link
from phalanx.planner.cluster.machine import Machine
from phalanx.planner.model.read import shape_of
from phalanx.planner.model.recipe import Recipe
from phalanx.planner.model.shape import ModelShape

GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}
TINY = {"model_type": "gpt2", "n_embd": 64, "n_layer": 8, "n_head": 8, "vocab_size": 128, "n_positions": 64}


@pytest.fixture
def gpt2() -> ModelShape:
    return shape_of(GPT2)


@pytest.fixture
def tiny() -> ModelShape:
    return shape_of(TINY)


@pytest.fixture
def cluster() -> Cluster:
    """Two nodes of four, fast inside and slow between."""
    device = Device(
        title="a device", memory_gib=8.0, bandwidth_gb_per_s=100.0, fp32_tflops=1.0, bf16_tflops=8.0, power_w=100.0
    )
    return Cluster(
        title="two nodes",
        pools=(Pool(device="d", count=8),),
        per_node=4,
        inside=Link(latency_s=1e-6, bytes_per_s=1e11),
        between=Link(latency_s=1e-5, bytes_per_s=1e9),
        devices={"d": device},
    )


@pytest.fixture
def machine() -> Machine:
    fast, slow = Link(latency_s=1e-6, bytes_per_s=1e11), Link(latency_s=1e-5, bytes_per_s=1e9)
    return Machine(flops_per_s=5e11, memory_bytes_per_s=1e11, per_node=4, inside=fast, between=slow)


@pytest.fixture
def recipe() -> Recipe:
    return Recipe(sequences=32, sequence_length=64, microbatches=4)
