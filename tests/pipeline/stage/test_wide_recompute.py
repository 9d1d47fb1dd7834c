"""A referee in float64 has no rounding of its own: it tells which of two is off where float32 cannot."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from phalanx.models import ModelConfig, StageSpec, build_stage, open_model
from phalanx.pipeline import StageRunner, WideRunner, token_distance
from phalanx.pipeline.stage.float64 import recompute_in
from phalanx.pipeline.stage.rounding import MARGIN, rounding_noise
from phalanx.pipeline.tolerance.distance import classify_distance

ARCHITECTURES = {
    "gpt2": {"n_layer": 3, "n_embd": 64, "n_head": 4, "vocab_size": 40, "n_positions": 32},
    "opt": {
        "num_hidden_layers": 3,
        "hidden_size": 64,
        "ffn_dim": 96,
        "num_attention_heads": 4,
        "vocab_size": 40,
        "max_position_embeddings": 32,
    },
    "bloom": {"n_layer": 3, "hidden_size": 64, "n_head": 4, "vocab_size": 40},
    "llama": {
        "num_hidden_layers": 3,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 40,
        "max_position_embeddings": 32,
    },
}
DROPOUT = {
    "gpt2": ("resid_pdrop", "attn_pdrop"),
    "opt": ("dropout", "attention_dropout"),
    "bloom": ("hidden_dropout", "attention_dropout"),
    "llama": ("attention_dropout",),
}
FAMILIES = sorted(ARCHITECTURES)
TAU = 1e-5


@pytest.fixture
def make_runner(model_cache):
    def make(family="gpt2", *, dropout=0.0, checkpointing=False):
        architecture = {"model_type": family} | ARCHITECTURES[family] | dict.fromkeys(DROPOUT[family], dropout)
        source = open_model(ModelConfig(from_scratch=True, architecture=architecture), model_cache, seed=1)
        spec = StageSpec(1, 3, 1, 2)
        module = build_stage(
            source, spec, adapter=None, activation_checkpointing=checkpointing, attention="sdpa", seed=1
        )
        return StageRunner(module, spec, seed=3, precision="fp32", device="cpu")

    return make


def hidden(seed):
    return torch.randn(2, 24, 64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_wide_result_is_the_narrow_one_up_to_rounding(make_runner, family, dropout, checkpointing):
    runner = make_runner(family, dropout=dropout, checkpointing=checkpointing)

    narrow = runner.recompute_microbatch(4, 1, hidden(1), hidden(2))
    wide = recompute_in(torch.float64, runner, 4, 1, hidden(1), hidden(2))

    for mine, true in zip(narrow, wide, strict=True):
        assert true.dtype == torch.float64
        assert 0 < token_distance(mine, true) < TAU / 2


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_inside_is_rounded_to_float32(make_runner, family):
    runner = WideRunner(make_runner(family))
    x, step = hidden(1).double(), 1e-8 * hidden(3).double()

    (before, _), (here, _), (after, _) = (runner.recompute_microbatch(0, 0, x + k * step, None) for k in (-1, 0, 1))

    # a rounding to 24 bits anywhere would be larger than the step itself
    assert (after + before - 2 * here).norm() < 1e-4 * (after - before).norm()


def test_two_honest_kernels_are_both_honest_to_it_though_their_bits_differ(make_runner):
    runner = make_runner()
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        one = runner.recompute_microbatch(0, 0, hidden(1), hidden(2))
    with sdpa_kernel(SDPBackend.MATH):
        other = runner.recompute_microbatch(0, 0, hidden(1), hidden(2))
    true = recompute_in(torch.float64, runner, 0, 0, hidden(1), hidden(2))

    for a, b, t in zip(one, other, true, strict=True):
        assert not torch.equal(a, b)
        # roundings that both share keep it further from either than they are from each other
        assert 0 < token_distance(a, t) < TAU / 10
        assert 0 < token_distance(b, t) < TAU / 10


def test_in_the_grey_zone_it_acquits_the_honest_one_and_not_the_other(make_runner):
    runner = make_runner()
    honest, _ = runner.recompute_microbatch(0, 0, hidden(1), None)
    lie = honest * (1 + 1.5 * TAU)

    true, _ = recompute_in(torch.float64, runner, 0, 0, hidden(1), None)

    assert classify_distance(token_distance(lie, honest), TAU) == "grey"
    assert classify_distance(token_distance(honest, true), TAU) == "honest"
    assert classify_distance(token_distance(lie, true), TAU) == "grey"


def test_the_runner_is_left_as_it_was(make_runner):
    runner = make_runner()
    before = {name: value.clone() for name, value in runner.module.all_parameters().items()}
    runner.forward(0, 0, hidden(1))

    recompute_in(torch.float64, runner, 0, 0, hidden(1), hidden(2))

    runner.backward(0, 0, hidden(2))
    assert all(torch.equal(value, before[name]) for name, value in runner.module.all_parameters().items())
    assert {value.dtype for value in runner.module.all_parameters().values()} == {torch.float32}


def cancelling(seed):
    # every number is close to one large one, which a layer norm takes away: what is left is mostly rounding
    return 300 + 0.1 * hidden(seed)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("inputs", [hidden, cancelling])
def test_what_another_kernel_rounds_differently_is_within_the_measured_noise(make_runner, family, direction, inputs):
    runner = make_runner(family)
    x, gradient = inputs(1), hidden(2)
    with sdpa_kernel(SDPBackend.MATH):
        other = runner.recompute_microbatch(0, 0, x, gradient)
    mine = runner.recompute_microbatch(0, 0, x, gradient)

    noise = rounding_noise(runner, 0, 0, direction, x, gradient)

    which = 0 if direction == "forward" else 1
    assert token_distance(other[which], mine[which]) <= MARGIN * noise


def test_noise_is_a_hundred_times_larger_where_numbers_cancel(make_runner):
    runner = make_runner()

    ordinary = rounding_noise(runner, 0, 0, "backward", hidden(1), hidden(2))
    spike = rounding_noise(runner, 0, 0, "backward", cancelling(1), hidden(2))

    assert MARGIN * ordinary < TAU
    assert spike > 100 * ordinary


def test_noise_is_the_same_whoever_measures_it(make_runner):
    assert rounding_noise(make_runner(), 5, 1, "forward", hidden(1), None) == rounding_noise(
        make_runner(), 5, 1, "forward", hidden(1), None
    )
