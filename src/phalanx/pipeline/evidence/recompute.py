"""A recomputation of a disputed microbatch from the evidence alone."""

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from phalanx.errors import FrameError, ModelError, SignatureError
from phalanx.models import made_one_by_one, shared_hub_config, stage_table
from phalanx.pipeline.evidence.checked import CheckedEvidence
from phalanx.pipeline.evidence.files import MICROBATCH_INPUTS, NOISE_PREFIX, STAGE_PREFIX, TRUTH_PREFIX
from phalanx.pipeline.protocol.messages import Activation, Commit, Ready, StateDigest, UpdateReport
from phalanx.pipeline.protocol.signed import Statement
from phalanx.pipeline.protocol.tensor_stream import transfer_digest
from phalanx.pipeline.stage.float64 import exact_gradient
from phalanx.pipeline.stage.stage_copy import StageCopy, seeded_mean, stage_spec
from phalanx.security.privacy import SEED_BYTES

MAX_LAYERS = 1024
"""Layers, or labels, of a model that a file of others may claim; whole models are built of them, without memory."""


def weights_vouched_by(checked: CheckedEvidence) -> list[str]:
    """Return the parties that signed the digest of the weights with which the referee recomputed.

    Across numeric classes two honest copies of a stage have two digests; each party answers for its own.

    Raises:
        EvidenceError: The guilty party signed another digest, or no party signed this one.
    """
    verdict, signers, others = checked.record.verdict, list[str](), list[str]()
    for role in ("state_holder", "state_shadow"):
        header = checked.headers.get(role)
        if header is None:
            continue
        state = state_of_header(checked, role)
        if state is None or state.step != verdict.step:
            raise checked.refusal_error(
                f"header {role!r} does not describe the state of stage {verdict.stage} at step {verdict.step}"
            )
        (signers if state.weights == checked.record.weights_digest else others).append(header.fields.sender)
    if verdict.party in others or (others and not signers):
        raise checked.refusal_error(f"{' and '.join(others)} signed other weights than the referee used")
    return signers


def state_of_header(checked: CheckedEvidence, role: str) -> StateDigest | None:
    """The state of the verdict's stage that a header of this role is about; None when it is about others."""
    stage, header = checked.record.verdict.stage, checked.headers.get(role)
    kind = None if header is None else header.fields.kind
    if kind == UpdateReport.kind:
        return checked.read_statement(role, UpdateReport).message.states.get(str(stage))
    return checked.read_statement(role, Ready).message.states.get(str(stage))


def recompute_message(checked: CheckedEvidence, direction: str, microbatch: int) -> Tensor | None:
    """Build the stage again and recompute the disputed message on this machine.

    Returns:
        The message ``[batch, seq, dim]``; None when the weights are not in the evidence.

    Raises:
        EvidenceError: Weights or plan are not the record's, or do not fit together.
    """
    record, copy = checked.record, _shown_stage(checked)
    if copy is None:
        return None
    gradient = checked.tensors.get("gradient") if direction == "backward" else None
    with _threads_of_run(checked):
        y, x_gradient = copy.runner.recompute_microbatch(
            record.verdict.step, microbatch, checked.tensors["input"], gradient
        )
    return y if x_gradient is None else x_gradient


def redo_gradient(checked: CheckedEvidence, committed: Statement[Commit]) -> dict[str, Tensor] | None:
    """Run a stage's whole step again from the inputs that the stage committed to.

    Returns:
        The weight gradient; None when weights or inputs are not in the evidence.

    Raises:
        EvidenceError: Weights, inputs or plan are not the signed ones, or do not fit together.
    """
    step = _committed_step(checked, committed)
    if step is None:
        return None
    copy, inputs = step
    privacy, number = checked.record.plan.privacy, committed.message.step
    seeds = _noise_seeds(checked, copy)
    if seeds is None:
        return None
    with _threads_of_run(checked):
        for microbatch, (x, gradient) in enumerate(inputs):
            copy.runner.forward(number, microbatch, x)
            copy.runner.backward(number, microbatch, gradient)
        if privacy is None:
            return copy.weight_gradient(number, None)
        return seeded_mean(copy.runner.take_gradients(), privacy, seeds)


def redo_exactly(checked: CheckedEvidence, committed: Statement[Commit]) -> dict[str, Tensor]:
    """As `redo_gradient`, in float64; empty when weights, inputs or noise are not in the evidence."""
    step = _committed_step(checked, committed)
    seeds = None if step is None else _noise_seeds(checked, step[0])
    if step is None or seeds is None:
        return {}
    with _threads_of_run(checked):
        return exact_gradient(step[0], committed.message.step, step[1], seeds)


def _committed_step(
    checked: CheckedEvidence, committed: Statement[Commit]
) -> tuple[StageCopy, list[tuple[Tensor, Tensor]]] | None:
    """The stage and what it committed to have computed from; None when either is not in the evidence."""
    copy = _shown_stage(checked)
    if copy is None:
        return None
    received, inputs = _committed_inputs(checked, committed), list[tuple[Tensor, Tensor]]()
    for m in range(checked.record.plan.microbatches):
        x, gradient = (_committed_input(checked, received, direction, m) for direction in ("forward", "backward"))
        if x is None or gradient is None:
            return None
        inputs.append((x, gradient))
    return copy, inputs


def _noise_seeds(checked: CheckedEvidence, copy: StageCopy) -> dict[str, bytes] | None:
    """The seeds of the noise in this step, by tensor; None when one of them is missing where rows are hidden."""
    if checked.record.plan.privacy is None:
        return {}
    shown = checked.tensors_under(NOISE_PREFIX)
    if shown.keys() != copy.module.trainable_parameters().keys():
        return None
    if any(tensor.dtype != torch.uint8 or tensor.shape != (SEED_BYTES,) for tensor in shown.values()):
        raise checked.refusal_error("a seed of its noise has another type or size")
    return {name: bytes(tensor.tolist()) for name, tensor in shown.items()}


def redo_update(checked: CheckedEvidence, before: StateDigest, gradient: str, clip: float) -> StateDigest | None:
    """Let the optimizer take a step again from a signed state with a committed gradient.

    Args:
        before: The signed state before the step.
        clip: Coefficient by which clipping scaled it.

    Returns:
        The state after the step; None when state or gradient are not in the evidence.

    Raises:
        EvidenceError: They are not the signed ones, or do not fit the plan.
    """
    state, applied = checked.tensors_under(STAGE_PREFIX), checked.tensors_under(TRUTH_PREFIX)
    if not state or not applied:
        return None
    if transfer_digest(applied) != gradient:
        raise checked.refusal_error("its gradient is not the committed one")
    copy = _rebuild_stage(checked, {name: tensor for name, tensor in state.items() if name.startswith(_WEIGHTS)})
    names = {name: (tensor.shape, tensor.dtype) for name, tensor in copy.state_tensors().items()}
    if {name: (tensor.shape, tensor.dtype) for name, tensor in state.items()} != names:
        raise checked.refusal_error("names, shapes or types of its state differ from its plan")
    copy.load_tensors(state, before.step)
    if copy.compute_digest() != before:
        raise checked.refusal_error("its state differs from the one signed before the step")
    with _threads_of_run(checked):
        copy.apply_update(before.step, applied, clip)
    return copy.compute_digest()


_WEIGHTS = ("frozen/", "weight/")


def _committed_inputs(checked: CheckedEvidence, committed: Statement[Commit]) -> dict[tuple[str, int], str]:
    """Return the digests of a step's inputs, as their senders signed them and the stage showed them."""
    commit, holder = committed.message, committed.header.fields.sender
    received: dict[tuple[str, int], str] = {}
    for signed in commit.received:
        place = {"step": commit.step, "target": commit.stage}
        try:
            shown = checked.statements.open_statement(signed, Activation, commit.epoch, place, lambda _: (None, holder))
        except (FrameError, SignatureError) as exc:
            raise checked.refusal_error(f"an input of its commitment is invalid: {exc}") from exc
        received[(shown.message.direction, shown.message.microbatch)] = shown.payload_digest
    return received


def _committed_input(
    checked: CheckedEvidence, received: Mapping[tuple[str, int], str], direction: str, microbatch: int
) -> Tensor | None:
    name = f"{MICROBATCH_INPUTS[('forward', 'backward').index(direction)]}-{microbatch:05d}"
    digest = received.get((direction, microbatch))
    if digest is None or name not in checked.tensors:
        return None
    if checked.digest_of(name) != digest:
        raise checked.refusal_error(f"tensor {name!r} differs from the stage's commitment")
    if tuple(checked.tensors[name].shape) != checked.record.plan.hidden_shape:
        raise checked.refusal_error(f"tensor {name!r} has not the plan's shape")
    return checked.tensors[name]


@contextlib.contextmanager
def _threads_of_run(checked: CheckedEvidence) -> Iterator[None]:
    """Compute with as many threads as a run does; another number may give other bits."""
    threads = torch.get_num_threads()
    if not checked.pins.in_run:
        torch.set_num_threads(1)
    try:
        yield
    except RuntimeError as exc:
        raise checked.refusal_error(f"its stage cannot be run on its input: {exc}") from exc
    finally:
        torch.set_num_threads(threads)


def _shown_stage(checked: CheckedEvidence) -> StageCopy | None:
    """Build the stage from the weights in the evidence; None when they are not there."""
    weights = checked.tensors_under(STAGE_PREFIX)
    if not weights:
        return None
    copy = _rebuild_stage(checked, weights)
    if copy.weights_digest() != checked.record.weights_digest:
        raise checked.refusal_error("its weights differ from their signed digest")
    return copy


def _rebuild_stage(checked: CheckedEvidence, weights: Mapping[str, Tensor]) -> StageCopy:
    here = {} if checked.pins.in_run else {"device": "cpu", "activation_checkpointing": False}
    plan = checked.record.plan.model_copy(update=here)
    stage = checked.record.verdict.stage
    if not 0 <= stage < len(plan.stages):
        raise checked.refusal_error(f"stage {stage} is not one of the plan's {len(plan.stages)}")
    spec = stage_spec(plan, stage)
    try:
        # read off the keys: what builds a model to count it does as much work as its config claims
        claimed = made_one_by_one(plan.hub_config)
        if claimed > MAX_LAYERS and not checked.pins.in_run:
            raise checked.refusal_error(f"its plan claims {claimed} layers or labels, above the limit of {MAX_LAYERS}")
        # counted before it has memory: a plan must not claim any that its weights do not fill
        (row,) = stage_table(shared_hub_config(plan.hub_config), (spec,), plan.adapter)
        num_values = sum(tensor.numel() for tensor in weights.values())
        if row.kept != num_values:
            raise checked.refusal_error(f"holds {num_values} weights, its plan has {row.kept} in stage {stage}")
        copy = StageCopy.build_empty(plan, stage)
    except (ModelError, ValueError, RuntimeError) as exc:
        raise checked.refusal_error(f"its plan builds no stage: {exc}") from exc
    expected = {name: (tensor.shape, tensor.dtype) for name, tensor in copy.weight_tensors().items()}
    if {name: (tensor.shape, tensor.dtype) for name, tensor in weights.items()} != expected:
        raise checked.refusal_error("names, shapes or types of its weights differ from its plan")
    copy.load_weights(weights)
    return copy
