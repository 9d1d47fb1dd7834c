"""A stage's AdamW equals torch's bit for bit, and can be copied, repeated and undone exactly."""

import pytest
import torch
from torch.nn import Parameter

from phalanx.errors import CheckpointError, ModelError, TrainingError
from phalanx.optimizers import OptimizerConfig, StageOptimizer

SHAPES = {"norm.weight": (37,), "attention.weight": (24, 37), "mlp.weight": (37, 19), "mlp.bias": (19,)}
CONFIG = OptimizerConfig(lr=1e-2, weight_decay=0.3, betas=(0.8, 0.95), eps=1e-7)


def made_parameters(seed=0):
    draw = torch.Generator().manual_seed(seed)
    return {name: Parameter(torch.randn(shape, generator=draw)) for name, shape in SHAPES.items()}


def made_gradients(seed):
    draw = torch.Generator().manual_seed(1000 + seed)
    return {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}


def advance(optimizer, steps, coefficient=1.0):
    for step in steps:
        optimizer.step(made_gradients(step), lr=1e-2 / (step + 1), clip_coefficient=coefficient)


def copied(optimizer):
    return {name: tensor.clone() for name, tensor in optimizer.state_tensors().items()}


def same(left, right):
    return list(left) == list(right) and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("coefficient", [1.0, 0.37])
def test_every_step_equals_torch_bit_for_bit(coefficient):
    ours, theirs = made_parameters(), made_parameters()
    optimizer = StageOptimizer(ours, CONFIG)
    decayed = [weight for weight in theirs.values() if weight.ndim >= 2]
    rest = [weight for weight in theirs.values() if weight.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.3}, {"params": rest, "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.95), eps=1e-7, fused=True)

    for step in range(30):
        advance(optimizer, [step], coefficient)
        for group in reference.param_groups:
            group["lr"] = 1e-2 / (step + 1)
        for name, weight in theirs.items():
            weight.grad = made_gradients(step)[name] * coefficient
        reference.step()

    for name in SHAPES:
        kept = reference.state[theirs[name]]
        state = optimizer.state_tensors()
        assert torch.equal(ours[name], theirs[name])
        assert torch.equal(state[f"exp_avg/{name}"], kept["exp_avg"])
        assert torch.equal(state[f"exp_avg_sq/{name}"], kept["exp_avg_sq"])
        assert ours[name].grad is None


def test_the_first_step_is_what_the_formula_says():
    parameters = {"w": Parameter(torch.full((1, 1), 2.0)), "b": Parameter(torch.full((1,), 2.0))}
    optimizer = StageOptimizer(parameters, OptimizerConfig(lr=0.1, weight_decay=0.5, eps=1e-12))

    optimizer.step({"w": torch.full((1, 1), 4.0), "b": torch.full((1,), -4.0)}, lr=0.1, clip_coefficient=1.0)

    assert parameters["w"].item() == pytest.approx(2.0 * (1 - 0.1 * 0.5) - 0.1)
    assert parameters["b"].item() == pytest.approx(2.0 + 0.1)


def test_the_state_exists_before_the_first_step_in_the_order_of_the_names():
    optimizer = StageOptimizer(made_parameters(), CONFIG)
    reordered = StageOptimizer(dict(reversed(made_parameters().items())), CONFIG)

    state = optimizer.state_tensors()

    assert list(state)[:3] == [
        "weight/attention.weight",
        "exp_avg/attention.weight",
        "exp_avg_sq/attention.weight",
    ]
    assert list(state) == list(reordered.state_tensors())
    assert not any(tensor.requires_grad for tensor in state.values())
    assert not any(tensor.any() for name, tensor in state.items() if name.startswith("exp_"))
    assert optimizer.num_steps == 0


def test_the_state_is_the_real_thing():
    parameters = made_parameters()
    optimizer = StageOptimizer(parameters, CONFIG)

    assert optimizer.state_tensors()["weight/mlp.bias"].data_ptr() == parameters["mlp.bias"].data_ptr()
    parameters["mlp.bias"].data = torch.zeros(19)
    assert not optimizer.state_tensors()["weight/mlp.bias"].any()


@pytest.mark.parametrize("coefficient", [1.0, 0.5])
def test_gradients_are_left_as_they_were(coefficient):
    optimizer, gradients = StageOptimizer(made_parameters(), CONFIG), made_gradients(0)

    optimizer.step(gradients, lr=0.1, clip_coefficient=coefficient)

    assert same(gradients, made_gradients(0))


def test_two_holders_with_the_same_gradients_stay_equal():
    stage, shadow = (StageOptimizer(made_parameters(), CONFIG) for _ in range(2))

    advance(stage, range(50), 0.9)
    advance(shadow, range(50), 0.9)

    assert same(stage.state_tensors(), shadow.state_tensors())


def test_a_forged_gradient_of_one_number_is_seen_in_the_state():
    stage, shadow = (StageOptimizer(made_parameters(), CONFIG) for _ in range(2))
    forged = made_gradients(0)
    forged["mlp.weight"][5, 5] *= -1

    advance(stage, [0])
    shadow.step(forged, lr=1e-2, clip_coefficient=1.0)

    assert not same(stage.state_tensors(), shadow.state_tensors())


def test_a_snapshot_undoes_steps_exactly_and_more_than_once():
    optimizer = StageOptimizer(made_parameters(), CONFIG)
    advance(optimizer, range(3))
    optimizer.keep_snapshot()
    before = copied(optimizer)
    advance(optimizer, [3, 4])
    after = copied(optimizer)

    for _ in range(2):
        optimizer.restore_snapshot()
        assert same(optimizer.state_tensors(), before)
        assert optimizer.num_steps == 3
        advance(optimizer, [3, 4])
        assert same(optimizer.state_tensors(), after)


def test_a_new_snapshot_replaces_the_old_one_in_the_same_buffers():
    optimizer = StageOptimizer(made_parameters(), CONFIG)
    optimizer.keep_snapshot()
    advance(optimizer, [0])
    optimizer.keep_snapshot()
    before = copied(optimizer)
    advance(optimizer, [1])

    assert same(optimizer.undo_state(), before)
    optimizer.restore_snapshot()

    assert same(optimizer.state_tensors(), before)
    assert optimizer.num_steps == 1


def test_there_is_nothing_to_undo_without_a_snapshot():
    optimizer = StageOptimizer(made_parameters(), CONFIG)

    with pytest.raises(TrainingError, match="no snapshot to go back to"):
        optimizer.restore_snapshot()
    with pytest.raises(TrainingError, match="no snapshot to look at"):
        optimizer.undo_state()


def test_a_loaded_state_goes_on_exactly():
    optimizer, other = StageOptimizer(made_parameters(), CONFIG), StageOptimizer(made_parameters(7), CONFIG)
    advance(optimizer, range(4))

    other.load_state(copied(optimizer), optimizer.num_steps)
    advance(optimizer, [4, 5])
    advance(other, [4, 5])

    assert same(other.state_tensors(), optimizer.state_tensors())
    assert other.num_steps == 6


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("missing", r"missing \['exp_avg/mlp.bias'\]"),
        ("unknown", r"unknown \['weight/other'\]"),
        ("shape", r"weight/mlp.bias: found torch.float32 \[18\], expected torch.float32 \[19\]"),
        ("dtype", r"weight/mlp.bias: found torch.float64"),
        ("steps", "-1 steps"),
    ],
)
def test_a_foreign_state_is_refused_and_changes_nothing(change, said):
    optimizer = StageOptimizer(made_parameters(), CONFIG)
    before = copied(optimizer)
    state = {name: torch.ones_like(tensor) for name, tensor in before.items()}
    if change == "missing":
        del state["exp_avg/mlp.bias"]
    elif change == "unknown":
        state["weight/other"] = torch.zeros(1)
    elif change == "shape":
        state["weight/mlp.bias"] = torch.zeros(18)
    elif change == "dtype":
        state["weight/mlp.bias"] = torch.zeros(19, dtype=torch.float64)

    with pytest.raises(CheckpointError, match=said):
        optimizer.load_state(state, -1 if change == "steps" else 3)

    assert same(optimizer.state_tensors(), before)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"mlp.bias": None}, r"no gradient for \['mlp.bias'\]"),
        ({"other": torch.zeros(1)}, r"unknown \['other'\]"),
        ({"mlp.bias": torch.zeros(1)}, r"gradient of mlp.bias: found torch.float32 \[1\]"),
        ({"mlp.bias": torch.zeros(19, dtype=torch.bfloat16)}, "found torch.bfloat16"),
    ],
)
def test_a_malformed_gradient_is_refused_and_changes_nothing(change, said):
    optimizer = StageOptimizer(made_parameters(), CONFIG)
    before = copied(optimizer)
    gradients = {name: value for name, value in (made_gradients(0) | change).items() if value is not None}

    with pytest.raises(TrainingError, match=said):
        optimizer.step(gradients, lr=0.1, clip_coefficient=1.0)

    assert same(optimizer.state_tensors(), before)
    assert optimizer.num_steps == 0


@pytest.mark.parametrize(("lr", "coefficient"), [(float("nan"), 1.0), (0.1, float("nan")), (0.1, float("inf"))])
def test_a_rate_that_is_no_number_is_refused(lr, coefficient):
    optimizer = StageOptimizer(made_parameters(), CONFIG)

    with pytest.raises(TrainingError, match="must be finite"):
        optimizer.step(made_gradients(0), lr=lr, clip_coefficient=coefficient)


def test_a_tied_weight_is_refused_under_two_names():
    weight = Parameter(torch.zeros(2, 2))

    with pytest.raises(ModelError, match="two names"):
        StageOptimizer({"a": weight, "b": weight}, CONFIG)


def test_a_stage_without_parameters_can_step():
    optimizer = StageOptimizer({}, CONFIG)

    optimizer.keep_snapshot()
    optimizer.step({}, lr=0.1, clip_coefficient=0.5)

    assert optimizer.state_tensors() == {}
    optimizer.restore_snapshot()
    assert optimizer.num_steps == 0
