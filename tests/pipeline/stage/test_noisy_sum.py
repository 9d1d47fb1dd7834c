"""A stage's sum of clipped rows, and the noise on it: as much as was accounted for, alike for all with its key."""

import math

import numpy as np
import pytest
import torch

from phalanx.errors import FrameError, ModelError, TrainingError
from phalanx.models import StageSpec, open_model
from phalanx.pipeline.assignment.assignment import Assignment
from phalanx.pipeline.plan import RowPrivacy
from phalanx.pipeline.protocol.messages import NoiseKeys
from phalanx.pipeline.protocol.signed import StatementReader
from phalanx.pipeline.stage.kernel_fingerprint import fingerprint_kernels
from phalanx.pipeline.stage.runner import StageRunner
from phalanx.pipeline.stage.stage_copy import noisy_mean
from phalanx.pipeline.worker.roles import PartyContext, Roles
from phalanx.security.privacy import NoiseSecret, SecureStream, gaussian_noise, noise_commitment, noise_stream
from phalanx.telemetry import PhaseTimer
from phalanx.testing import tiny_run
from phalanx.train.setup.layout import make_plan

PRIVACY = RowPrivacy(clip_norm=0.5, noise_multiplier=3.0, mean_rows=10)
KEY = NoiseSecret(lambda size: b"s" * size).key_of(0, 1)
ZEROS = {"b": torch.zeros(200, 200), "a": torch.zeros(300)}


def test_noise_has_the_deviation_that_was_accounted_for():
    found = noisy_mean(ZEROS, PRIVACY, 7, KEY)

    values = torch.cat([tensor.flatten() for tensor in found.values()]).double()
    accounted = 3.0 * 0.5 / 10
    # 40300 values: six standard errors of their deviation are 2.1 %, of their mean 3 % of it
    assert float(values.std()) == pytest.approx(accounted, rel=0.021)
    assert abs(float(values.mean())) < 0.03 * accounted
    assert float((values.abs() > 2 * accounted).double().mean()) == pytest.approx(0.0455, rel=0.15)


def test_noise_follows_from_key_step_and_name_alone():
    found = noisy_mean(ZEROS, PRIVACY, 7, KEY)
    again = noisy_mean({"a": torch.ones(300)}, PRIVACY, 7, KEY)

    assert torch.allclose(again["a"] - 0.1, found["a"], atol=1e-6)
    assert not torch.equal(found["a"], noisy_mean(ZEROS, PRIVACY, 8, KEY)["a"])
    assert not torch.equal(found["a"], found["b"].flatten()[:300])
    assert torch.equal(ZEROS["a"], torch.zeros(300))


def test_no_two_epochs_stages_or_sessions_have_a_key_in_common():
    secrets = [NoiseSecret(lambda size, byte=byte: byte * size) for byte in (b"s", b"t")]
    keys = {secret.key_of(epoch, stage) for secret in secrets for epoch in range(3) for stage in range(3)}

    assert len(keys) == len({noise_commitment(key) for key in keys}) == 18
    assert NoiseSecret().key_of(0, 0) != NoiseSecret().key_of(0, 0)


def test_a_stream_is_the_same_wherever_it_is_computed():
    """What a later version draws must be this, or auditors of two versions speak of two noises."""
    found = gaussian_noise(noise_stream(bytes(32), 0, "weight"), 3, 1.0).tolist()

    assert found == pytest.approx([0.26522928, 0.64133841, 1.11483407], abs=1e-6)


def test_a_party_that_computes_noise_otherwise_is_of_another_numeric_class(tmp_path, monkeypatch):
    """One rounding of one value apart, which single precision would hide in most of them."""
    plan = make_plan(tiny_run(), open_model(tiny_run().model, tmp_path, 7)).model_copy(update={"privacy": PRIVACY})
    ours, normal = fingerprint_kernels(plan, "ab" * 32), SecureStream.next_normals
    assert fingerprint_kernels(plan, "ab" * 32) == ours

    def of_another_library(stream, count):
        found = normal(stream, count)
        found[count // 2] = np.nextafter(found[count // 2], np.inf)
        return found

    monkeypatch.setattr(SecureStream, "next_normals", of_another_library)

    theirs = fingerprint_kernels(plan, "ab" * 32)
    assert theirs.gradient != ours.gradient
    assert theirs.forward == ours.forward


def test_a_sum_without_a_key_does_not_leave():
    with pytest.raises(TrainingError, match="the noise key of step 7 is missing"):
        noisy_mean(ZEROS, PRIVACY, 7, None)


class Rows(torch.nn.Module):
    """A stage of one linear layer."""

    def __init__(self, shared=False):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4, bias=False)
        self.shared_head = self.layer.weight if shared else None

    def trainable_parameters(self):
        return {"layer.weight": self.layer.weight}

    def forward(self, x):
        return self.layer(x)


def runner_of(module, clip):
    return StageRunner(module, StageSpec(1, 3, 1, 2), seed=0, precision="fp32", device="cpu", row_clip=clip)


def summed(clip, rows):
    torch.manual_seed(0)
    runner, generator = runner_of(Rows(), clip), torch.Generator().manual_seed(1)
    for number in range(rows):
        size = 10.0 ** (number - 2)
        x, gradient = (torch.randn(1, 3, 4, generator=generator) for _ in range(2))
        runner.forward(0, number, x)
        runner.backward(0, number, gradient * size)
    return runner.take_gradients()["layer.weight"]


@pytest.mark.parametrize("number", range(5))
def test_each_row_moves_the_sum_by_its_gradient_or_the_bound_whichever_is_less(number):
    def norm_of_last(clip):
        before = summed(clip, number) if number else torch.zeros(4, 4)
        return float((summed(clip, number + 1) - before).norm())

    whole = norm_of_last(1e9)

    assert norm_of_last(0.5) == pytest.approx(min(whole, 0.5), rel=1e-4)
    assert norm_of_last(0.5) <= 0.5 * (1 + 1e-5)


def test_a_row_with_a_gradient_that_is_not_finite_counts_for_nothing():
    runner = runner_of(Rows(), 0.5)
    x = torch.ones(1, 3, 4)
    for number, gradient in enumerate((torch.ones(1, 3, 4), torch.full((1, 3, 4), math.inf))):
        runner.forward(0, number, x)
        runner.backward(0, number, gradient)

    assert float(runner.take_gradients()["layer.weight"].norm()) == pytest.approx(0.5, rel=1e-4)


def test_a_step_that_is_abandoned_leaves_no_row_behind():
    runner = runner_of(Rows(), 0.5)
    runner.forward(0, 0, torch.ones(1, 3, 4))
    runner.backward(0, 0, torch.ones(1, 3, 4))

    runner.abandon_step()

    assert not runner.take_gradients()["layer.weight"].any()


def test_a_trained_head_that_is_tied_is_refused():
    with pytest.raises(ModelError, match="two stages clip parts of the tied head"):
        runner_of(Rows(shared=True), 0.5)


@pytest.fixture
def two_stages(tmp_path):
    """The roles of a party that holds stage 1 and shadows stage 2."""
    plan = make_plan(tiny_run(), open_model(tiny_run().model, tmp_path, 7)).model_copy(update={"privacy": PRIVACY})
    statements = StatementReader("run", lambda name: None)
    roles = Roles(PartyContext("worker-1", plan, lambda receiver, message, payload: None, statements, PhaseTimer()))
    roles.assignment = Assignment({0: "owner", 1: "worker-1", 2: "worker-2"}, {1: "worker-2", 2: "worker-1"})
    return roles


@pytest.mark.parametrize(
    ("stages", "size"), [((1,), 64), ((1, 2), 32), ((1, 2, 3), 96), ((1, 1), 64)], ids=["few", "short", "many", "twice"]
)
def test_keys_of_other_stages_or_lengths_are_refused(two_stages, stages, size):
    with pytest.raises(FrameError, match="noise keys of stages"):
        two_stages.take_noise_keys(NoiseKeys(epoch=0, stages=stages), memoryview(bytes(size)))

    assert not two_stages.noise_keys


def test_keys_are_taken_once_an_epoch(two_stages):
    payload = memoryview(b"1" * 32 + b"2" * 32)
    two_stages.take_noise_keys(NoiseKeys(epoch=0, stages=(1, 2)), payload)

    assert two_stages.noise_keys == {1: b"1" * 32, 2: b"2" * 32}
    with pytest.raises(FrameError, match="once an epoch"):
        two_stages.take_noise_keys(NoiseKeys(epoch=0, stages=(1, 2)), payload)
