"""Frozen layers of real models at an offload client: what is replaced, how far off it is, what is refused."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from masked_worlds import (
    ARCHITECTURES,
    BLOCKS,
    LAYERS,
    LINEARS,
    SEQ,
    VOCAB,
    Liar,
    Spy,
    a_desk,
    a_model,
    lm_loss,
    relative,
    some_ids,
)
from torch import nn

from phalanx.errors import ConfigError, FixedPointError, ModelError, PadError, WrongProductError
from phalanx.models import PrefixConfig, SpfConfig
from phalanx.security.mask import P, ProductMessage
from phalanx.split.masked import (
    MaskedConfig,
    MaskedLinear,
    MaskingClient,
    SimulatedWorker,
    mask_linears,
    open_masking_client,
    process_pads,
)
from phalanx.split.masked.idle import PadFiller
from phalanx.split.masked.pad_sources import pad_sources, system_pads

FAMILIES = sorted(ARCHITECTURES)
MAX_ERROR = 1.2e-3


def a_linear(inner=24, columns=16, *, trained=False):
    torch.manual_seed(1)
    layer = nn.Linear(inner, columns)
    layer.weight.requires_grad_(trained)
    return layer


def some_rows(rows=8, inner=24):
    return torch.randn(rows, inner, generator=torch.Generator().manual_seed(2))


def losses(stage, steps=12):
    optimizer = torch.optim.AdamW(stage.trainable_parameters().values(), lr=1e-2)
    found = []
    for step in range(steps):
        ids = some_ids(seed=step % 4)
        loss = lm_loss(stage(ids), ids)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_every_frozen_linear_layer_is_masked_and_adapters_stay_inside(cache, family):
    stage = a_model(cache, family)
    trained = set(stage.trainable_parameters())

    replaced = mask_linears(stage, a_desk())

    blocks = [f"{BLOCKS[family]}.{i}.{name}" for i in range(LAYERS) for name in LINEARS[family]]
    assert replaced == [*blocks, "lm_head"]
    assert set(stage.trainable_parameters()) == trained != set()
    left = [name for name, module in stage.named_modules() if isinstance(module, nn.Linear)]
    assert left != []
    assert all(".lora_" in name for name in left)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_layer_of_a_model_is_off_by_no_more_than_twelve_in_ten_thousand(cache, family):
    plain, masked = a_model(cache, family), a_model(cache, family)
    replaced = mask_linears(masked, a_desk())
    errors = {}

    def compare(name):
        layer = plain.get_submodule(name)
        layer = getattr(layer, "base_layer", layer)

        def hook(module, inputs, output):
            errors[name] = relative(output, layer(inputs[0]))

        return hook

    for name in replaced:
        layer = masked.get_submodule(name)
        getattr(layer, "base_layer", layer).register_forward_hook(compare(name))
    masked(some_ids())

    assert set(errors) == set(replaced)
    assert max(errors.values()) <= MAX_ERROR


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_the_adapters_are_those_of_the_plain_model_up_to_rounding(cache, family):
    plain, masked, ids = a_model(cache, family), a_model(cache, family), some_ids()
    mask_linears(masked, a_desk())

    for stage in (plain, masked):
        lm_loss(stage(ids), ids).backward()

    for name, value in plain.trainable_parameters().items():
        assert relative(masked.trainable_parameters()[name].grad, value.grad) <= 5e-3, name


def test_training_masked_gives_nearly_the_losses_of_training_plain(cache):
    plain, masked = a_model(cache), a_model(cache)
    mask_linears(masked, a_desk())

    expected, found = losses(plain), losses(masked)

    assert found == pytest.approx(expected, rel=1e-3)
    assert expected[-1] < 0.98 * expected[0]
    assert found != expected


def a_task(sequences, seed):
    """The next token is the next number, but for one in four, which is random."""
    generator = torch.Generator().manual_seed(seed)
    counted = (torch.arange(sequences).unsqueeze(1) + torch.arange(SEQ)) % VOCAB
    noise = torch.randint(0, VOCAB, counted.shape, generator=generator)
    return torch.where(torch.rand(counted.shape, generator=generator) < 0.25, noise, counted)


def test_accuracy_is_within_three_tenths_of_a_point(cache):
    stage = a_model(cache, adapter=None)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-2)
    for step in range(40):
        ids = a_task(64, step)
        loss = lm_loss(stage(ids), ids)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    stage.requires_grad_(False)
    held_out = a_task(512, 1000)

    def accuracy():
        return float((stage(held_out)[:, :-1].argmax(-1) == held_out[:, 1:]).float().mean())

    plain = accuracy()
    mask_linears(stage, a_desk(rows=8192))

    assert 0.3 < plain < 0.9
    assert abs(accuracy() - plain) <= 0.003


def test_two_runs_with_different_pads_are_bit_identical(cache):
    found = []
    for pads in (process_pads("run-1"), system_pads()):
        stage = a_model(cache)
        mask_linears(stage, a_desk(pads=pads))
        found.append(losses(stage, steps=2))

    assert found[0] == found[1]


def test_checkpointing_recomputes_with_new_pads_and_changes_no_bit(cache):
    gradients, numbers = [], []
    for recompute in (False, True):
        stage, spy, ids = a_model(cache, recompute=recompute), Spy(), some_ids()
        mask_linears(stage, a_desk(spy))
        lm_loss(stage(ids), ids).backward()
        gradients.append([value.grad for value in stage.trainable_parameters().values()])
        numbers.append([one.number for one in spy.requests("transformer.h.0.mlp.c_fc")])
        assert len({one.number for one in spy.seen}) == len(spy.seen)

    assert all(torch.equal(left, right) for left, right in zip(*gradients, strict=True))
    assert [len(found) for found in numbers] == [1, 2]


def test_a_bias_may_be_trained_here():
    layer = a_linear()
    masked = MaskedLinear(layer, "layer", a_desk())
    x = some_rows().requires_grad_()

    masked(x).sum().backward()

    assert torch.equal(masked.bias.grad, torch.full((16,), 8.0))
    assert relative(x.grad, layer.weight.sum(0).expand(8, -1)) <= MAX_ERROR


@pytest.mark.parametrize("shape", [(8,), (2, 5), (1, 2, 3), (0,), (300,)])
def test_any_number_of_rows_and_leading_dimensions_fits(shape):
    layer = a_linear()
    masked = MaskedLinear(layer, "layer", a_desk(rows=7))
    x = torch.randn(*shape, 24, generator=torch.Generator().manual_seed(2))

    y = masked(x)

    assert y.shape == (*shape, 16)
    assert torch.allclose(y, layer(x), atol=1e-3)


def test_what_is_computed_in_bfloat16_comes_back_in_bfloat16():
    layer = a_linear()
    masked = MaskedLinear(layer, "layer", a_desk())
    x = some_rows().bfloat16().requires_grad_()

    y = masked(x)
    y.float().sum().backward()

    assert y.dtype == x.grad.dtype == torch.bfloat16
    assert relative(y, layer(x.float())) <= 5e-3


def test_a_layer_that_occurs_twice_is_masked_once():
    layer = a_linear(24, 24)
    module = nn.Sequential(layer, nn.Tanh(), layer)
    spy = Spy()

    assert mask_linears(module, a_desk(spy)) == ["0"]
    assert module[0] is module[2]
    module(some_rows())
    assert len(spy.requests("0")) == 2


class Shortcut(nn.Linear):
    """Reads its weight itself, as torch's own attention does with its output projection."""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("0", "^0: its weight is trained, and would change under its mask"),
        ("1", "^1: is a Tanh; only frozen nn.Linear and Conv1D layers can be masked"),
        ("2", "^2: is a LayerNorm; only frozen"),
        ("3", "^3: is a Shortcut; only frozen"),
        ("9", "^9: is not a layer of this module"),
    ],
)
def test_what_is_trained_not_linear_or_not_there_is_refused(name, said):
    frozen = Shortcut(24, 24).requires_grad_(False)
    module = nn.Sequential(a_linear(24, 24, trained=True), nn.Tanh(), nn.LayerNorm(24), frozen)

    with pytest.raises(ModelError, match=said):
        mask_linears(module, a_desk(), [name])
    assert isinstance(module[0], nn.Linear)


def test_a_model_of_which_everything_is_trained_has_nothing_to_mask(cache):
    with pytest.raises(ModelError, match="no frozen linear layer"):
        mask_linears(a_model(cache, adapter=None), a_desk())


def test_a_layer_without_weights_yet_is_refused():
    layer = nn.Linear(4, 4, device="meta").requires_grad_(False)

    with pytest.raises(ModelError, match=r"^layer: has no weights yet"):
        MaskedLinear(layer, "layer", a_desk())


def test_two_layers_of_one_name_are_refused():
    offload = a_desk()
    MaskedLinear(a_linear(), "layer", offload)

    with pytest.raises(ConfigError, match=r"^layer: is at this client already"):
        MaskedLinear(a_linear(), "layer", offload)


def test_a_step_is_refused_when_there_is_no_pad_and_none_may_be_made_late():
    spy = Spy()
    offload = a_desk(spy, late_pads=False)
    masked = MaskedLinear(a_linear(), "layer", offload)

    with pytest.raises(PadError, match=r"^layer, forward: 1 pads are needed, 0 are ready, and nothing is sent without"):
        masked(some_rows())
    assert spy.seen == []
    assert offload.fill_pools(1) == 2
    x = some_rows().requires_grad_()
    masked(x).sum().backward()
    with pytest.raises(PadError, match="0 are ready"):
        masked(some_rows())


def test_a_pad_that_cannot_be_made_fresh_stops_the_step_before_anything_is_sent():
    class Worn:
        def draw_pad(self, rows, columns):
            if columns > 2:
                raise PadError("pad ledger: the disk refuses")
            return system_pads()(ProductMessage("layer", "forward")).draw_pad(rows, columns)

    spy = Spy()
    masked = MaskedLinear(a_linear(), "layer", a_desk(spy, pads=lambda product: Worn()))

    with pytest.raises(PadError, match="the disk refuses"):
        masked(some_rows())
    assert spy.seen == []


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_stops_the_step_forward_and_backward(bad):
    masked = MaskedLinear(a_linear(), "layer", a_desk())
    x = some_rows()
    x[2, 3] = bad

    with pytest.raises(FixedPointError, match=r"^layer, forward: row 2 holds NaN or infinity"):
        masked(x)
    y = masked(some_rows().requires_grad_())
    with pytest.raises(FixedPointError, match=r"^layer, backward: row 0 holds NaN or infinity"):
        (y.sum() * bad).backward()


def test_an_activation_beyond_the_bound_stops_the_step():
    masked = MaskedLinear(a_linear(), "layer", a_desk(bound=10.0))
    masked(some_rows())

    with pytest.raises(FixedPointError, match=r"^layer, forward: overflow: row"):
        masked(100 * some_rows())


def test_a_second_worker_sees_pads_alone_and_changes_no_bit():
    first, second = Spy("first"), Spy("second")
    x = some_rows()
    alone = MaskedLinear(a_linear(), "layer", a_desk())(x)

    both = MaskedLinear(a_linear(), "layer", a_desk(first, second=second))(x)

    assert torch.equal(both, alone)
    (sent,), (pad,) = first.seen, second.seen
    assert sent.number == pad.number
    assert not np.array_equal(sent.values, pad.values[: len(sent.values)])


def test_the_worker_that_lied_is_named_be_it_the_first_or_the_second():
    def bend(product, values):
        values[0, 0] = (int(values[0, 0]) + 1) % P
        return values

    honest, liar = SimulatedWorker("honest"), Liar(bend)

    with pytest.raises(WrongProductError, match=r"^liar: layer, forward, pad \d+: is not the product"):
        MaskedLinear(a_linear(), "layer", a_desk(liar))(some_rows())
    with pytest.raises(WrongProductError, match=r"^liar: layer, forward, pad \d+: is not the product"):
        MaskedLinear(a_linear(), "layer", a_desk(honest, second=liar))(some_rows())


def test_one_worker_cannot_be_both():
    with pytest.raises(ConfigError, match=r"^one: is named as both workers"):
        a_desk(SimulatedWorker("one"), second=SimulatedWorker("one"))
    with pytest.raises(ConfigError, match="second_worker is true, and no second worker is there"):
        MaskingClient(SimulatedWorker(), process_pads("run-1"), MaskedConfig(second_worker=True))


def test_idle_time_fills_the_pools_so_that_no_layer_waits(cache):
    stage = a_model(cache)
    offload = a_desk()
    mask_linears(stage, offload)

    with PadFiller(offload, reserve=2) as idle:
        assert idle.full.wait(60)
        lm_loss(stage(some_ids()), some_ids()).backward()

    assert offload.late_pads == 0
    assert idle.failure is None


def test_a_desk_of_a_run_file_fills_itself_as_layers_are_added():
    layer = a_linear()

    with open_masking_client(MaskedConfig(rows=8, reserve=1), "run-1", SimulatedWorker()) as offload:
        masked = MaskedLinear(layer, "layer", offload)
        y = masked(some_rows())

    assert relative(y, layer(some_rows())) <= MAX_ERROR


def test_an_idle_thread_that_cannot_make_pads_says_why():
    class Spent:
        def draw_pad(self, rows, columns):
            if columns > 2:
                raise PadError("pad ledger: its counter failed")
            return system_pads()(ProductMessage("layer", "forward")).draw_pad(rows, columns)

    offload = a_desk(pads=lambda product: Spent())
    MaskedLinear(a_linear(), "layer", offload)

    with PadFiller(offload, reserve=1) as idle:
        idle.ended.wait(60)

    assert str(idle.failure) == "pad ledger: its counter failed"


@pytest.mark.parametrize("kind", ["aes", "os"])
def test_both_kinds_of_pads_of_a_run_file_serve_a_desk(kind):
    offload = a_desk(pads=pad_sources(MaskedConfig(pads=kind), "run-1"))
    layer = a_linear()

    y = MaskedLinear(layer, "layer", offload)(some_rows())

    assert relative(y, layer(some_rows())) <= MAX_ERROR


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_a_worker_with_an_accelerator_gives_the_same_bits():
    x = some_rows(64)

    found = [MaskedLinear(a_linear(), "layer", a_desk(SimulatedWorker(device=name)))(x) for name in ("cpu", "cuda")]

    assert torch.equal(*found)


def test_a_masked_layer_shows_neither_weights_nor_the_desks_secrets():
    shown = repr(MaskedLinear(a_linear(), "layer", a_desk()))

    assert shown == "MaskedLinear(layer, in_features=24, out_features=16)"


def test_a_worker_process_needs_no_torch():
    program = "import sys, phalanx.split.masked, phalanx.cli.app; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize("adapter", [SpfConfig(kind="spf"), PrefixConfig(kind="ptuning")], ids=lambda one: one.kind)
def test_other_kinds_of_adapters_stay_inside_as_well(cache, adapter):
    plain, masked, ids = a_model(cache, adapter=adapter), a_model(cache, adapter=adapter), some_ids()[:, :8]

    replaced = mask_linears(masked, a_desk())

    assert len(replaced) == 4 * LAYERS + 1
    for stage in (plain, masked):
        lm_loss(stage(ids), ids).backward()
    for name, value in plain.trainable_parameters().items():
        assert relative(masked.trainable_parameters()[name].grad, value.grad) <= 5e-3, name


@pytest.mark.parametrize(("tokens", "rows"), [(1, 1), (128, 128), (512, 512), (513, 257), (700, 350), (2048, 512)])
def test_pads_have_as_many_rows_as_a_microbatch_needs_unless_somebody_says_otherwise(tokens, rows):
    assert MaskedConfig().for_tokens(tokens).rows == rows
    assert MaskedConfig(rows=7).for_tokens(tokens).rows == 7
