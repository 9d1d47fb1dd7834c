"""A recomputation of a disputed microbatch from the evidence alone."""

from collections.abc import Mapping

import torch
from torch import Tensor

from phalanx.errors import ModelError
from phalanx.models import made_one_by_one, shared_hub_config, stage_table
from phalanx.pipeline.evidence.checked import CheckedEvidence
from phalanx.pipeline.evidence.files import STAGE_PREFIX
from phalanx.pipeline.protocol.messages import Ready, StateDigest, UpdateReport, WeightsHeld
from phalanx.pipeline.stage.stage_copy import StageCopy, stage_spec

MOST_LAYERS = 1024
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
        state = said_state(checked, role)
        if state is None or state.step != verdict.step:
            raise checked.refuse(
                f"header {role!r} is not about the state of stage {verdict.stage} at step {verdict.step}"
            )
        (signers if state.weights == checked.record.weights_digest else others).append(header.fields.sender)
    if verdict.party in others or (others and not signers):
        raise checked.refuse(f"{' and '.join(others)} signed other weights than the referee used")
    return signers


def said_state(checked: CheckedEvidence, role: str) -> StateDigest | None:
    """The state of the verdict's stage that a header of this role is about; None when it is about others.

    Raises:
        EvidenceError: The header is missing, or none about states.
    """
    stage, header = checked.record.verdict.stage, checked.headers.get(role)
    kind = None if header is None else header.fields.kind
    if kind == WeightsHeld.kind:
        held = checked.said(role, WeightsHeld).message
        return held.state if held.stage == stage else None
    if kind == UpdateReport.kind:
        return checked.said(role, UpdateReport).message.states.get(str(stage))
    return checked.said(role, Ready).message.states.get(str(stage))


def redo(checked: CheckedEvidence, direction: str, microbatch: int) -> Tensor | None:
    """Build the stage again and recompute the disputed message on this machine.

    Returns:
        The message ``[batch, seq, dim]``; None when the weights are not in the evidence.

    Raises:
        EvidenceError: The weights or the plan are not what the record says, or do not fit together.
    """
    record = checked.record
    weights = {
        name.removeprefix(STAGE_PREFIX): tensor
        for name, tensor in checked.tensors.items()
        if name.startswith(STAGE_PREFIX)
    }
    if not weights:
        return None
    copy = _rebuild(checked, weights)
    if copy.weights_digest() != record.weights_digest:
        raise checked.refuse("its weights are not those whose digest it names")
    gradient = checked.tensors.get("gradient") if direction == "backward" else None
    threads = torch.get_num_threads()
    if not checked.pins.in_run:
        # what a run uses unless it says otherwise; another number may give other bits
        torch.set_num_threads(1)
    try:
        y, x_gradient = copy.runner.recompute(record.verdict.step, microbatch, checked.tensors["input"], gradient)
    except RuntimeError as exc:
        raise checked.refuse(f"its stage cannot be run on its input: {exc}") from exc
    finally:
        torch.set_num_threads(threads)
    return y if x_gradient is None else x_gradient


def _rebuild(checked: CheckedEvidence, weights: Mapping[str, Tensor]) -> StageCopy:
    here = {} if checked.pins.in_run else {"device": "cpu", "activation_checkpointing": False}
    plan = checked.record.plan.model_copy(update=here)
    stage = checked.record.verdict.stage
    if not 0 <= stage < len(plan.stages):
        raise checked.refuse(f"stage {stage} is not one of the plan's {len(plan.stages)}")
    spec = stage_spec(plan, stage)
    try:
        # read off the keys: what builds a model to count it does as much work as its config claims
        claimed = made_one_by_one(plan.hub_config)
        if claimed > MOST_LAYERS and not checked.pins.in_run:
            raise checked.refuse(
                f"its plan claims {claimed} layers or labels, more than the {MOST_LAYERS} that evidence is built of"
            )
        # counted before it has memory: a plan must not claim any that its weights do not fill
        (row,) = stage_table(shared_hub_config(plan.hub_config), (spec,), plan.adapter)
        found = sum(tensor.numel() for tensor in weights.values())
        if row.kept != found:
            raise checked.refuse(f"holds {found} weights, its plan has {row.kept} in stage {stage}")
        copy = StageCopy.empty(plan, stage)
    except (ModelError, ValueError, RuntimeError) as exc:
        raise checked.refuse(f"its plan builds no stage: {exc}") from exc
    expected = {name: (tensor.shape, tensor.dtype) for name, tensor in copy.weights().items()}
    if {name: (tensor.shape, tensor.dtype) for name, tensor in weights.items()} != expected:
        raise checked.refuse("names, shapes or types of its weights are not those of its plan")
    copy.load_weights(weights)
    return copy
