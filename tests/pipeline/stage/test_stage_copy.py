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
    return {n: torch.randn(p.shape, generator=generator) for n, p in copy.module.trainable_parameters().items()}


def test_the_same_steps_give_two_copies_the_same_digest(made):
    _, build = made
    one, other = build(), build()
    assert one.compute_digest() == other.compute_digest()
    before = one.compute_digest()

    for step in range(3):
        one.apply_update(step, gradients(one, step), 0.5)
        other.apply_update(step, gradients(other, step), 0.5)

    assert one.compute_digest() == other.compute_digest()
    assert one.compute_digest() != before
    assert one.compute_digest().step == one.step_count == 3


def test_a_state_loaded_elsewhere_goes_on_with_the_same_bits(made):
    plan, build = made
    copy = build()
    copy.apply_update(0, gradients(copy, 0), 1.0)
    empty = StageCopy.build_empty(plan, 1)
    assert empty.compute_digest() != copy.compute_digest()

    empty.load_tensors({name: tensor.clone() for name, tensor in copy.state_tensors().items()}, copy.step_count)
    assert empty.compute_digest() == copy.compute_digest()

    for each in (copy, empty):
        each.apply_update(1, gradients(each, 1), 0.7)
    assert empty.compute_digest() == copy.compute_digest()


def test_loaded_weights_are_enough_to_recompute_and_have_the_signed_digest(made):
    plan, build = made
    copy = build()
    copy.apply_update(0, gradients(copy, 0), 1.0)
    auditor = StageCopy.build_empty(plan, 1)

    auditor.load_weights(copy.weight_tensors())

    assert auditor.weights_digest() == copy.compute_digest().weights
    assert auditor.compute_digest().moments != copy.compute_digest().moments
    x = torch.randn(plan.hidden_shape)
    assert torch.equal(
        auditor.runner.recompute_microbatch(0, 0, x, None)[0], copy.runner.recompute_microbatch(0, 0, x, None)[0]
    )


@pytest.mark.parametrize("part", ["weight/", "exp_avg/", "exp_avg_sq/", "frozen/"])
def test_one_bit_of_any_tensor_changes_the_digest(made, part):
    _, build = made
    copy, touched = build(), build()
    names = [name for name in touched.state_tensors() if name.startswith(part)]
    if not names:
        pytest.skip("no frozen weights without adapters")

    with torch.no_grad():
        view = touched.state_tensors()[names[-1]].view(-1)
        view[-1] = torch.nextafter(view[-1], torch.tensor(9.0))

    assert touched.compute_digest() != copy.compute_digest()
    weights_differ = touched.compute_digest().weights != copy.compute_digest().weights
    assert weights_differ == (part in ("weight/", "frozen/"))


def test_an_update_for_another_step_is_refused_and_nothing_moves(made):
    _, build = made
    copy = build()
    before = copy.compute_digest()

    for step in (1, 7):
        with pytest.raises(StaleReplicaError, match=f"at step 0, but the update is for {step}"):
            copy.apply_update(step, gradients(copy, 0), 1.0)

    assert copy.compute_digest() == before


def test_a_state_of_another_stage_is_refused(made):
    plan, build = made
    copy = build()
    state = {
        name.replace("h.1", "h.2"): tensor for name, tensor in copy.state_tensors().items() if "frozen" not in name
    }
    state |= {name: tensor for name, tensor in copy.state_tensors().items() if "frozen" in name}

    with pytest.raises(CheckpointError):
        StageCopy.build_empty(plan, 1).load_tensors(state, 0)


def test_the_digest_of_a_copy_counts_its_steps(made):
    _, build = made
    one, other = build(), build()
    other.load_tensors({name: tensor.clone() for name, tensor in one.state_tensors().items()}, 1)

    assert (one.compute_digest().weights, one.compute_digest().moments) == (
        other.compute_digest().weights,
        other.compute_digest().moments,
    )
    assert one.compute_digest() != other.compute_digest()
