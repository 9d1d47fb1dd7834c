"""The kernel fingerprint, which measures a party's numeric class: the model's kernels on freshly drawn inputs."""

import hashlib
import math
from typing import Any

import torch
from torch import Tensor

from phalanx.pipeline.config import GuardConfig
from phalanx.pipeline.plan import StageRange, StepPlan
from phalanx.pipeline.protocol.greetings import KernelDigests
from phalanx.pipeline.protocol.tensor_stream import tensors_digest
from phalanx.pipeline.stage.runner import finite_norm_squared
from phalanx.pipeline.stage.stage_copy import StageCopy, WrapCopy, leave_unwrapped
from phalanx.pipeline.tolerance.numeric_class import local_numeric_class
from phalanx.security.privacy import noise_stream

NONCE_BYTES = 32
"""Of the owner's draw, from which every party makes the same inputs."""

_VALUES = 2**16
"""Of noise: libraries that compute a logarithm or a cosine in other ways differ in some of so many."""

_MIN_LAYERS = 3
"""Layers of a model that has one which stands neither first nor last."""

_UPDATES = 2
"""Optimizer steps: the first one starts from moments that are zero, the second one does not."""


@torch.enable_grad()
def fingerprint_kernels(plan: StepPlan, nonce: str, kernels: WrapCopy = leave_unwrapped) -> KernelDigests:
    """Compute one layer of the run's model once, as a stage would, on inputs that follow from a nonce.

    Covered are all bits that two parties ever compare: forward and backward messages, with and without a graph, the
    weight gradient, its norm, and weights and moments after an update. Shapes, precision, attention kernel and
    optimizer are the run's own. The update is made of drawn gradients, so that it depends on the optimizer alone.

    Args:
        plan: The run, with the device on which this party computes.
        nonce: Hex, drawn by the owner for this very measurement.
        kernels: Wraps a plain copy, such as in a group of ranks.

    Returns:
        Digests that two parties have in common when they compute the same bits.
    """
    copy = kernels(StageCopy.build_empty(_one_layer_plan(plan), 1), True)
    width = plan.hidden_size**-0.5
    weights = copy.weight_tensors()
    # linear layers keep the scale of what goes through them, as those of a real model do
    copy.load_weights(
        {name: _draw_values(nonce, name, t) * (2 * width if t.ndim > 1 else 1.0) for name, t in weights.items()}
    )
    shape = torch.empty(plan.hidden_shape, device="meta")
    x, gradient = _draw_values(nonce, "x", shape) * 2, _draw_values(nonce, "gradient", shape) * 2**-10
    runner = copy.runner
    y, x_gradient = runner.forward(0, 0, x), runner.backward(0, 0, gradient)
    weight_gradient = runner.take_gradients()
    plain, _ = runner.recompute_microbatch(0, 0, x, None)
    _, audited = runner.recompute_microbatch(0, 0, x, gradient)
    backward, square = {"x": x_gradient, "audited": audited}, finite_norm_squared(weight_gradient, plan.numerics)
    norm = torch.tensor(math.inf if square is None else square, dtype=torch.float64)
    for step in range(_UPDATES):
        gradients = {
            name: _draw_values(nonce, f"{step} {name}", t) * 2**-10
            for name, t in copy.module.trainable_parameters().items()
        }
        copy.apply_update(step, gradients, 0.7)
    return KernelDigests(
        forward=tensors_digest({"y": y, "plain": plain}),
        backward=tensors_digest({name: t for name, t in backward.items() if t is not None}),
        gradient=tensors_digest({**weight_gradient, "norm": norm, **_draw_noise(plan, nonce)}),
        update=tensors_digest(copy.optimizer.state_tensors()),
    )


def class_of_session(plan: StepPlan, session: str) -> dict[str, Any] | None:
    """Describe this machine's numeric class for the log: whoever recomputes the session compares kernels with it.

    Returns:
        None where the arithmetic is exact, so that every machine is of one class, and for a model without a layer
        between its first and its last one, of which no other machine can have a stage.
    """
    if plan.numerics != "float" or plan.stages[-1].end_layer - plan.stages[0].first_layer < _MIN_LAYERS:
        return None
    nonce = hashlib.sha256(f"phalanx numeric class {session}".encode()).hexdigest()
    described = local_numeric_class(plan.device).model_dump()
    return {
        "kernels": fingerprint_kernels(plan, nonce).model_dump(mode="json"),
        "described": ", ".join(f"{name} {value}" for name, value in described.items() if value),
    }


def _one_layer_plan(plan: StepPlan) -> StepPlan:
    """The first layer that is in other hands, or the last but one, as the middle one of three stages."""
    end_layer = plan.stages[-1].end_layer
    first = min(plan.stages[1].first_layer if len(plan.stages) > 1 else 1, end_layer - 2)
    cuts = ((0, first), (first, first + 1), (first + 1, end_layer))
    stages = tuple(StageRange(first_layer=low, end_layer=high) for low, high in cuts)
    return plan.model_copy(update={"stages": stages, "guard": GuardConfig(mode="off", classes=plan.guard.classes)})


def _draw_values(nonce: str, name: str, like: Tensor) -> Tensor:
    """Numbers between -1 and 1 with the same bits on every machine: only integers and powers of two are involved."""
    raw = hashlib.shake_256(f"phalanx battery {nonce} {name}".encode()).digest(2 * like.numel())
    drawn = torch.frombuffer(bytearray(raw), dtype=torch.int16).to(torch.float32) * 2**-15
    return drawn.reshape(like.shape)


def _draw_noise(plan: StepPlan, nonce: str) -> dict[str, Tensor]:
    """Normal values in double precision, of which rounding hides nothing; none where no noise is added."""
    if plan.privacy is None:
        return {}
    key = hashlib.sha256(f"phalanx battery {nonce} noise".encode()).digest()
    return {"noise": torch.from_numpy(noise_stream(key, 0, "battery").next_normals(_VALUES))}
