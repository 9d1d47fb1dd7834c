"""What each attack changes, and that it changes nothing else."""

import json
import math

import pytest
import torch

from phalanx.attacks import ATTACKS, AttackedRunner, attack_wrapper
from phalanx.attacks.attacker import noise_seed
from phalanx.errors import ConfigError
from phalanx.models import StageSpec
from phalanx.pipeline import AttackConfig, StageRunner, token_distance

DIRECTIONS = {"forward_sign_flip": {"forward"}, "backward_gaussian": {"backward"}}


class Doubling(StageRunner):
    """An honest stage that doubles what it gets, both ways; remembers what it was asked."""

    def __init__(self):
        self.module, self.spec = torch.nn.Identity(), StageSpec(1, 3, 1, 2)
        self.asked = []

    def forward(self, step, microbatch, x):
        self.asked.append(("forward", step, microbatch))
        return 2 * x

    def backward(self, step, microbatch, gradient):
        self.asked.append(("backward", step, microbatch))
        return None if gradient is None else 2 * gradient

    def gradients(self):
        return {"weight": torch.ones(3)}

    def abandon(self):
        self.asked.append("abandon")


def attacked(kind, log=None, party="worker-1", **config):
    return attack_wrapper(AttackConfig(kind=kind, **config), party, log)(Doubling())


def some(seed=0):
    return torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(seed))


def test_every_attack_of_the_table_is_tested_here():
    assert set(ATTACKS) == set(DIRECTIONS)


@pytest.mark.parametrize("kind", sorted(ATTACKS))
def test_an_attack_changes_its_own_direction_and_only_that(kind):
    runner, x = attacked(kind), some()

    sent = {"forward": runner.forward(3, 1, x), "backward": runner.backward(3, 1, x)}

    changed = {direction for direction, tensor in sent.items() if not torch.equal(tensor, 2 * x)}
    assert changed == DIRECTIONS[kind]
    for tensor in sent.values():
        assert (tensor.shape, tensor.dtype) == (x.shape, x.dtype)
        assert math.isfinite(token_distance(tensor, 2 * x))
    assert torch.equal(x, some()), "the input is somebody else's"


@pytest.mark.parametrize("kind", sorted(ATTACKS))
def test_the_work_itself_is_done_honestly(kind):
    runner = attacked(kind)

    runner.forward(3, 1, some())
    runner.backward(3, 1, some())
    gradients = runner.gradients()
    runner.abandon()

    assert torch.equal(gradients["weight"], torch.ones(3))
    assert runner._honest.asked == [("forward", 3, 1), ("backward", 3, 1), "abandon"]
    assert runner.spec == StageSpec(1, 3, 1, 2)


def test_a_sign_flip_is_exactly_that():
    x = some()

    assert torch.equal(attacked("forward_sign_flip").forward(0, 0, x), -2 * x)


def test_gaussian_noise_is_standard_normal_and_owes_nothing_to_the_gradient():
    runner = attacked("backward_gaussian")
    gradient = torch.full((32, 64, 16), 1e3)

    noise = runner.backward(0, 0, gradient)

    assert abs(float(noise.mean())) < 0.02
    assert float(noise.std()) == pytest.approx(1.0, abs=0.02)
    assert torch.equal(runner.backward(0, 0, torch.zeros_like(gradient)), noise)


def test_noise_differs_by_message_seed_and_party_and_by_nothing_else():
    gradient = some()
    base = attacked("backward_gaussian").backward(0, 0, gradient)

    torch.manual_seed(123)
    assert torch.equal(attacked("backward_gaussian").backward(0, 0, gradient), base)
    others = [
        attacked("backward_gaussian").backward(0, 1, gradient),
        attacked("backward_gaussian").backward(1, 0, gradient),
        attacked("backward_gaussian", seed=1).backward(0, 0, gradient),
        attacked("backward_gaussian", party="worker-2").backward(0, 0, gradient),
    ]
    assert all(not torch.equal(other, base) for other in others)


def test_noise_is_the_same_on_every_machine():
    assert noise_seed(0, "worker-1", 2, 3) == 37725358847427382


def test_the_first_stages_missing_gradient_is_left_missing():
    assert attacked("backward_gaussian").backward(0, 0, None) is None


def test_an_unknown_attack_is_refused_with_the_choices():
    with pytest.raises(ConfigError, match=r"attack\.kind: found 'evil'; choices: none, backward_gaussian"):
        attack_wrapper(AttackConfig(kind="evil"), "worker-1", None)


def test_none_is_no_attack_to_be_wrapped():
    with pytest.raises(ConfigError, match="found 'none'"):
        attack_wrapper(AttackConfig(), "worker-1", None)


@pytest.mark.parametrize("kind", sorted(ATTACKS))
def test_each_lie_and_nothing_else_is_one_line_of_the_attackers_log(tmp_path, kind):
    log = tmp_path / "attack.jsonl"
    runner = attacked(kind, log, from_step=1, until_step=2)
    for step in range(3):
        for microbatch in range(2):
            runner.forward(step, microbatch, some())
            runner.backward(step, microbatch, some())

    (direction,) = DIRECTIONS[kind]
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert records == [
        {"party": "worker-1", "stage": 1, "step": 1, "microbatch": m, "direction": direction} for m in range(2)
    ]


def test_without_a_lie_there_is_no_log(tmp_path):
    log = tmp_path / "attack.jsonl"

    attacked("forward_sign_flip", log, rate=0.0).forward(0, 0, some())

    assert not log.exists()


def test_a_new_attack_is_one_class_with_one_method():
    class Zero(AttackedRunner):
        def lie(self, direction, tensor, generator):
            return torch.zeros_like(tensor)

    runner = Zero(Doubling(), AttackConfig(kind="zero"), "worker-1", None)

    assert not runner.forward(0, 0, some()).any()
    assert not runner.backward(0, 0, some()).any()
