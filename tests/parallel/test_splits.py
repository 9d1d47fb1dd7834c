"""Slices and the whole that they come from."""

import pytest
import torch

from phalanx.parallel.tensor.tensor_parallel import Split


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize(("dim", "parts"), [(0, 1), (1, 1), (1, 3)])
def test_slices_join_to_the_whole_again(dim, parts, count):
    whole = torch.arange(24.0 * 24).reshape(24, 24)
    split = Split(dim, parts)

    slices = [split.take_slice(whole, index, count) for index in range(count)]

    assert torch.equal(split.join_slices(slices), whole)
    assert all(piece.shape[dim] == 24 // count for piece in slices)


def test_each_rank_gets_some_of_query_key_and_value():
    fused = torch.tensor([[1, 1, 2, 2, 3, 3]])

    assert Split(1, 3).take_slice(fused, 1, 2).tolist() == [[1, 2, 3]]
