"""The mean of adapters is the mean of what they do, where the mean of their factors is not."""

import pytest
import torch

from phalanx.errors import ConfigError
from phalanx.federated.vectors import LowRank, mean_of_products, mean_product, to_rank


def adapter(rank: int, seed: int, scale: float = 2.0) -> LowRank:
    draw = torch.Generator().manual_seed(seed)
    return LowRank(torch.randn(rank, 12, generator=draw), torch.randn(9, rank, generator=draw), scale)


def product(one: LowRank) -> torch.Tensor:
    return one.scale * one.b @ one.a


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def test_the_mean_over_mixed_ranks_and_weights_is_exact_and_that_of_the_factors_is_not():
    adapters, weights = [adapter(2, 1), adapter(3, 2, 0.5), adapter(2, 3)], [1.0, 2.0, 5.0]
    expected = sum(w * product(one) for one, w in zip(adapters, weights, strict=True)) / 8

    found = mean_product(adapters, weights)

    assert off(product(found), expected) < 1e-6
    assert off(product(to_rank(found, 7, 2.0)), expected) < 1e-6
    apart = LowRank((adapters[0].a + adapters[2].a) / 2, (adapters[0].b + adapters[2].b) / 2, 2.0)
    assert off(product(apart), (product(adapters[0]) + product(adapters[2])) / 2) > 0.1


def test_a_lower_rank_loses_the_smallest_singular_values_and_no_more():
    whole = mean_product([adapter(3, seed) for seed in range(2)], [1, 1])
    values = torch.linalg.svdvals(product(whole).double())

    found = to_rank(whole, 4, 2.0)

    assert found.a.shape == (4, 12)
    assert (product(found) - product(whole)).norm() == pytest.approx(float(values[4:].norm()), rel=1e-4)


def test_frozen_a_stays_where_it_is_and_a_higher_rank_is_filled_with_zeros():
    frozen = adapter(2, 1).a
    adapters = [LowRank(frozen, adapter(2, seed).b, 1.0) for seed in (2, 3)]

    found = mean_product(adapters, [1, 3])

    expected = (adapters[0].b + 3 * adapters[1].b) / 4 @ frozen
    assert off(product(found), expected) < 1e-6
    assert to_rank(found, 20, 1.0).a.shape == (20, 12)
    assert off(product(to_rank(found, 20, 1.0)), expected) < 1e-6


@pytest.mark.parametrize(
    ("adapters", "weights"),
    [
        ([], []),
        ([adapter(2, 1)], []),
        ([adapter(2, 1)], [0.0]),
        ([adapter(2, 1), LowRank(torch.ones(2, 5), torch.ones(9, 2), 1.0)], [1, 1]),
    ],
)
def test_adapters_that_cannot_be_averaged_are_refused(adapters, weights):
    with pytest.raises(ConfigError, match="adapters"):
        mean_product(adapters, weights)


def test_one_update_of_many_factors_does_the_mean_of_what_they_do_and_others_move_by_the_mean():
    draw = torch.Generator().manual_seed(2)
    before = {
        "q.lora_A.weight": torch.randn(4, 6, generator=draw),
        "q.lora_B.weight": torch.zeros(5, 4),
        "head": torch.zeros(3),
    }
    # of rank one each, so that the sum fits into the rank
    deltas = [
        {
            "q.lora_A.weight": torch.zeros(4, 6),
            "q.lora_B.weight": torch.outer(torch.randn(5, generator=draw), torch.randn(4, generator=draw)),
            "head": torch.full((3,), float(number)),
        }
        for number in range(3)
    ]

    update = mean_of_products(before, deltas, [1.0, 2.0, 1.0])

    a, b = (before[name] + update[name] for name in ("q.lora_A.weight", "q.lora_B.weight"))
    wanted = (
        sum(w * d["q.lora_B.weight"] for w, d in zip((0.25, 0.5, 0.25), deltas, strict=True))
        @ before["q.lora_A.weight"]
    )
    torch.testing.assert_close(b @ a, wanted, rtol=1e-5, atol=1e-5)
    assert update["head"].tolist() == [1.0, 1.0, 1.0]
