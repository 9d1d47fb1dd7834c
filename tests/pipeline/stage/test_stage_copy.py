import pytest
import torch

from phalanx.errors import CheckpointError, StaleReplicaError
from phalanx.models import LoraConfig, open_model
from phalanx.pipeline import StageCopy
from phalanx.testing import tiny_run
from phalanx.train.setup.layout import make_plan
from phalanx.train.setup.stage_source import StageLibrary


@pytest.fixture(params=["all weights", "adapters"])
def made(request, model_cache):
    """A plan, and a function that builds stage 1 of it."""
    adapter = None
    if request.param == "adapters":
        pytest.importorskip("peft")
        adapter = LoraConfig(rank=2)
    run = tiny_run(3, adapter=adapter)
    source = open_model(run.model, model_cache, run.train.seed)
    plan = make_plan(run, source)
    return plan, lambda: StageLibrary(source, plan, None)(1)


def gradients(copy, seed):
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(p.shape, generator=generator) for n, p in copy.module.trainable().items()}


def test_the_same_steps_give_two_copies_the_same_digest(made):
    _, build = made
    one, other = build(), build()
    assert one.digest() == other.digest()
    before = one.digest()

    for step in range(3):
        one.apply(step, gradients(one, step), 0.5)
        other.apply(step, gradients(other, step), 0.5)

    assert one.digest() == other.digest()
    assert one.digest() != before
    assert one.digest().step == one.step == 3


def test_a_state_loaded_elsewhere_goes_on_with_the_same_bits(made):
    plan, build = made
    copy = build()
    copy.apply(0, gradients(copy, 0), 1.0)
    empty = StageCopy.build_empty(plan, 1)
    assert empty.compute_digest() != copy.digest()

    empty.load_tensors({name: tensor.clone() for name, tensor in copy.state().items()}, copy.step)
    assert empty.compute_digest() == copy.digest()

    for each in (copy, empty):
        each.apply_update(1, gradients(each, 1), 0.7)
    assert empty.compute_digest() == copy.digest()


def test_loaded_weights_are_enough_to_recompute_and_have_the_signed_digest(made):
    plan, build = made
    copy = build()
    copy.apply(0, gradients(copy, 0), 1.0)
    auditor = StageCopy.build_empty(plan, 1)

    auditor.load_weights(copy.weights())

    assert auditor.weights_digest() == copy.digest().weights
    assert auditor.compute_digest().moments != copy.digest().moments
    x = torch.randn(plan.hidden_shape)
    assert torch.equal(
        auditor.runner.recompute_microbatch(0, 0, x, None)[0], copy.runner.recompute_microbatch(0, 0, x, None)[0]
    )


@pytest.mark.parametrize("part", ["weight/", "exp_avg/", "exp_avg_sq/", "frozen/"])
def test_one_bit_of_any_tensor_changes_the_digest(made, part):
    _, build = made
    copy, touched = build(), build()
    names = [name for name in touched.state() if name.startswith(part)]
    if not names:
        pytest.skip("no frozen weights without adapters")

    with torch.no_grad():
        view = touched.state()[names[-1]].view(-1)
        view[-1] = torch.nextafter(view[-1], torch.tensor(9.0))

    assert touched.digest() != copy.digest()
    weights_differ = touched.digest().weights != copy.digest().weights
    assert weights_differ == (part in ("weight/", "frozen/"))


def test_an_update_for_another_step_is_refused_and_nothing_moves(made):
    _, build = made
    copy = build()
    before = copy.digest()

    for step in (1, 7):
        with pytest.raises(StaleReplicaError, match=f"at step 0, but the update is for {step}"):
            copy.apply(step, gradients(copy, 0), 1.0)

    assert copy.digest() == before


def test_a_state_of_another_stage_is_refused(made):
    plan, build = made
    copy = build()
    state = {name.replace("h.1", "h.2"): tensor for name, tensor in copy.state().items() if "frozen" not in name}
    state |= {name: tensor for name, tensor in copy.state().items() if "frozen" in name}

    with pytest.raises(CheckpointError):
        StageCopy.build_empty(plan, 1).load_tensors(state, 0)


def test_the_digest_of_a_copy_counts_its_steps(made):
    _, build = made
    one, other = build(), build()
    other.load({name: tensor.clone() for name, tensor in one.state().items()}, 1)

    assert (one.digest().weights, one.digest().moments) == (other.digest().weights, other.digest().moments)
    assert one.digest() != other.digest()
