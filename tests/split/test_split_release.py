"""Adapters leave clipped, with the promised noise, when enough clients have contributed, and otherwise not at all."""

import math
import secrets

import pytest
import torch
from split_scene import make_scene, same, train

from phalanx.errors import CheckpointError, ReleaseRefusedError
from phalanx.security.seal import ReleasePolicy
from phalanx.split.training.release import ReleaseMaker, standard_normals, total_norm
from phalanx.testing import SplitSimulator
from seeded_entropy import bytes_from

BEGINNING = {"a": torch.zeros(4, 4), "b": torch.ones(3)}
MOVED = {"a": torch.full((4, 4), 3.0), "b": torch.ones(3)}


def releasing(**policy):
    found = ReleaseMaker(ReleasePolicy(**{"min_clients": 2, "clip_norm": 6.0, **policy}), BEGINNING.items())
    for name in ("client-0", "client-1"):
        found.gate.note_contribution(name, 4)
    return found


def test_what_moved_too_far_leaves_shortened_and_what_did_not_as_it_is():
    _, short = releasing(clip_norm=6.0).make_release(MOVED.items())
    _, whole = releasing(clip_norm=12.5).make_release(MOVED.items())

    assert total_norm([short["a"] - BEGINNING["a"]]) == pytest.approx(6.0, rel=1e-5)
    assert total_norm([short["a"] - BEGINNING["a"]]) <= 6.0
    assert torch.equal(short["b"], BEGINNING["b"])
    assert torch.equal(whole["a"], MOVED["a"])


def test_the_next_release_is_judged_by_what_left_and_not_by_what_stayed():
    found = releasing(clip_norm=8.0)
    _, first = found.make_release(MOVED.items())
    for name in ("client-0", "client-1"):
        found.gate.note_contribution(name, 4)

    _, second = found.make_release(MOVED.items())

    assert total_norm([first["a"] - BEGINNING["a"]]) == pytest.approx(8.0, rel=1e-5)
    assert torch.equal(second["a"], MOVED["a"])
    assert total_norm([second["a"] - first["a"]]) <= 8.0


def test_noise_has_the_promised_size_and_is_never_the_same(monkeypatch):
    monkeypatch.setattr(secrets, "token_bytes", bytes_from(1))
    big = {"a": torch.zeros(200, 200)}
    found = ReleaseMaker(ReleasePolicy(min_clients=2, clip_norm=2.0, noise_multiplier=0.5), big.items())
    other = ReleaseMaker(ReleasePolicy(min_clients=2, clip_norm=2.0, noise_multiplier=0.5), big.items())
    for one in (found, other):
        one.gate.note_contribution("client-0", 1)
        one.gate.note_contribution("client-1", 1)

    permitted, noisy = found.make_release(big.items())

    assert permitted.noise_std == 1.0
    assert noisy["a"].std().item() == pytest.approx(1.0, rel=0.03)
    assert noisy["a"].mean().item() == pytest.approx(0.0, abs=0.03)
    assert not torch.equal(noisy["a"], other.make_release(big.items())[1]["a"])


def test_normal_numbers_are_finite_and_as_many_as_were_asked_for(monkeypatch):
    monkeypatch.setattr(secrets, "token_bytes", bytes_from(1))
    drawn = standard_normals(torch.Size((1000, 3)))

    assert drawn.shape == (1000, 3)
    assert drawn.dtype == torch.float64
    assert torch.isfinite(drawn).all()
    assert standard_normals(torch.Size((0,))).shape == (0,)
    assert abs(drawn.pow(4).mean().item() - 3.0) < 1.0


def test_too_few_clients_and_no_policy_keep_everything_sealed():
    nobody = ReleaseMaker(ReleasePolicy(min_clients=2, clip_norm=1.0), BEGINNING.items())
    without = ReleaseMaker(None, BEGINNING.items())

    for found in (nobody, without):
        with pytest.raises(ReleaseRefusedError) as refusal:
            found.make_release(MOVED.items())
        assert refusal.value.reason == "too_few_clients"


def test_weights_that_are_not_finite_stay():
    with pytest.raises(ReleaseRefusedError) as refusal:
        releasing().make_release({"a": torch.full((4, 4), math.nan), "b": torch.ones(3)}.items())

    assert refusal.value.reason == "not_finite"


def test_what_has_left_outlives_a_restart():
    found = releasing(clip_norm=6.0)
    release, left = found.make_release(MOVED.items())
    tensors, books = found.release_state()
    again = releasing(clip_norm=6.0)

    rest = again.restore_release({**tensors, "weight/a": torch.zeros(1)}, books)

    assert rest.keys() == {"weight/a"}
    permitted, once_more = again.make_release(MOVED.items())
    assert (permitted, same(once_more, left)) == (release, True)
    again.gate.note_contribution("client-0", 4)
    with pytest.raises(ReleaseRefusedError):
        again.make_release(MOVED.items())
    with pytest.raises(CheckpointError, match="another model"):
        again.restore_release({"released/z": torch.zeros(1)}, books)


def test_every_client_of_a_step_that_was_taken_counts(source):
    scene = make_scene(source, release=ReleasePolicy(min_clients=2, clip_norm=1.0))
    simulator = SplitSimulator(scene)

    train(simulator, 1)

    assert simulator.enclave.gate.release_counts()["examples"] == {"client-0": 2, "client-1": 2}
