"""Explanations of disputes about sent weights: did a stage send its shadow something else than what it signed?"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from phalanx.pipeline.evidence.checked import CheckedEvidence
from phalanx.pipeline.evidence.files import STAGE_PREFIX
from phalanx.pipeline.evidence.recompute import said_state
from phalanx.pipeline.protocol.messages import Bulk, StateDigest
from phalanx.pipeline.protocol.tensor_stream import is_whole_transfer, parts
from phalanx.pipeline.stage.stage_copy import state_digest, trained_digest
from phalanx.security.crypto import digest_hex


def part_name(number: int) -> str:
    """The role of the header of one part of a transfer, counted from 0."""
    return f"part-{number:05d}"


def sent_other_than_signed(*, snapshot: bool) -> str:
    """Say what a guilty stage did; the sentence goes on with the signed digest."""
    return "sent another snapshot than the one" if snapshot else "sent other weights than those"


def is_what_was_signed(tensors: Mapping[str, Tensor], signed: StateDigest) -> bool:
    """Whether trained weights, and moments where there are any, are those of a signed state."""
    frozen = signed.weights.removesuffix(trained_digest(signed))
    found = state_digest(tensors, frozen, signed.step)
    has_moments = any(not name.startswith("weight/") for name in tensors)
    return found == signed if has_moments else found.weights == signed.weights


def explain_sent_weights(checked: CheckedEvidence) -> tuple[dict[str, Any], str | None, str]:
    """Check a verdict on weights that were sent after an update.

    Returns:
        What was checked, what rests on the owner's word (None: nothing), and what the guilty party did.

    Raises:
        EvidenceError: Something does not hold.
    """
    verdict = checked.record.verdict
    names = sorted(name for name in checked.headers if name.startswith("part-"))
    sent = [checked.said(name, Bulk) for name in names]
    state, signer = said_state(checked, "state_holder"), checked.headers["state_holder"].fields.sender
    if {signer, *(part.header.fields.sender for part in sent)} != {verdict.party}:
        raise checked.refuse(f"accuses {verdict.party}, which did not sign all of it: the wrong party is named")
    snapshot = checked.record.plan.guard.keeps_snapshots
    purpose = "snapshot" if snapshot else "update"
    about = sent[0].message.model_copy(update={"stage": verdict.stage, "step": verdict.step, "purpose": purpose})
    if state is None or state.step != verdict.step or not is_whole_transfer(sent, about):
        raise checked.refuse("its headers are not those of one transfer of the stage's weights after that step")
    weights = {
        name.removeprefix(STAGE_PREFIX): tensor
        for name, tensor in checked.tensors.items()
        if name.startswith(STAGE_PREFIX)
    }
    what = f"{sent_other_than_signed(snapshot=snapshot)} whose digest it signed"
    if not weights:
        return {"weights": "not in the evidence"}, "which weights were sent: they are not in this file", what
    if [digest_hex(*part) for _, _, part in parts(weights)] != [part.digest for part in sent]:
        raise checked.refuse(f"its weights are not those that {verdict.party} sent")
    if is_what_was_signed(weights, state):
        raise checked.refuse(f"the weights that {verdict.party} sent have the digest that it signed: it is not guilty")
    return {"weights": "sent in signed parts; their digest is not the signed one"}, None, what
