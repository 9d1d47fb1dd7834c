"""The paper's detector compares bits, and only bits."""

import pytest
import torch

from phalanx.lab.reproduce.arms.duplicates import DuplicatedBlock, same_bits
from phalanx.pipeline import StageCopy
from phalanx.train.setup.stage_source import StageLibrary

STAGE = 2


@pytest.fixture
def stage(tiny) -> StageCopy:
    return StageLibrary(tiny.source, tiny.plan, None)(STAGE)


@pytest.fixture
def block(tiny) -> DuplicatedBlock:
    return DuplicatedBlock(StageLibrary(tiny.source, tiny.plan, None)(STAGE))


def tensor(seed):
    return torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(seed))


def with_one_bit_flipped(value, bit=0):
    bits = value.contiguous().view(torch.int32).clone()
    bits.view(-1)[-1] ^= 1 << bit
    return bits.view(torch.float32)


def test_an_honest_stage_is_never_accused_and_its_duplicate_stays_its_twin(stage, block):
    for step in range(5):
        for microbatch in range(4):
            x, gradient = tensor(step * 8 + microbatch), tensor(100 + step * 8 + microbatch)
            assert block.repeats_forward(step, microbatch, x, stage.runner.forward(step, microbatch, x))
            claimed = stage.runner.backward(step, microbatch, gradient)
            assert block.repeats_backward(step, microbatch, gradient, claimed)
        stage.optimizer.step(stage.runner.take_gradients(), 1e-2, 1.0)
        block.take_step(block.take_gradients(), 1e-2, 1.0)

    assert block.has_state_of(stage)


@pytest.mark.parametrize("bit", [0, 22, 31])
def test_one_flipped_bit_of_an_activation_is_found(stage, block, bit):
    honest = stage.runner.forward(0, 0, tensor(1))

    assert not block.repeats_forward(0, 0, tensor(1), with_one_bit_flipped(honest, bit))


def test_one_flipped_bit_of_a_gradient_is_found(stage, block):
    stage.runner.forward(0, 0, tensor(1))
    block.repeats_forward(0, 0, tensor(1), tensor(1))
    honest = stage.runner.backward(0, 0, tensor(2))

    assert not block.repeats_backward(0, 0, tensor(2), with_one_bit_flipped(honest))


@pytest.mark.parametrize(
    ("claimed", "same"),
    [
        (torch.tensor([0.0, 1.0]), True),
        (torch.tensor([-0.0, 1.0]), False),
        (torch.tensor([0.0, 1.0], dtype=torch.float64), False),
        (torch.tensor([[0.0, 1.0]]), False),
    ],
    ids=["equal", "minus zero", "another type", "another shape"],
)
def test_same_bits_means_same_bits(claimed, same):
    assert same_bits(torch.tensor([0.0, 1.0]), claimed) is same


def test_a_stage_that_honestly_sends_nan_is_not_accused():
    assert same_bits(torch.tensor([float("nan")]), torch.tensor([float("nan")]))


def test_a_duplicate_that_missed_an_update_accuses_an_honest_stage(stage, block):
    block.repeats_forward(0, 0, tensor(1), stage.runner.forward(0, 0, tensor(1)))
    stage.runner.backward(0, 0, tensor(2))
    stage.optimizer.step(stage.runner.take_gradients(), 1e-2, 1.0)

    assert not block.repeats_forward(1, 0, tensor(3), stage.runner.forward(1, 0, tensor(3)))
    assert not block.has_state_of(stage)
