"""Did a stage send other weights than those whose digest it signed? Answered from its own signatures."""

from typing import Any

from phalanx.pipeline.bulk import parts, tensors_digest
from phalanx.pipeline.evidence import STAGE_PREFIX
from phalanx.pipeline.hearing import Hearing
from phalanx.pipeline.messages import Bulk
from phalanx.pipeline.retrial import said_state
from phalanx.pipeline.stage_copy import trained_digest
from phalanx.pipeline.transfer import is_whole_transfer
from phalanx.security.crypto import digest_hex


def part_name(number: int) -> str:
    """The role of the header of one part of a transfer, counted from 0."""
    return f"part-{number:05d}"


def explain_sent_weights(hearing: Hearing) -> tuple[dict[str, Any], str | None, str]:
    """Check a verdict on weights that were sent after an update.

    Returns:
        What was checked, what rests on the owner's word (None: nothing), and what the guilty party did.

    Raises:
        EvidenceError: Something does not hold.
    """
    verdict = hearing.record.verdict
    names = sorted(name for name in hearing.headers if name.startswith("part-"))
    headers = [hearing.headers[name] for name in names]
    state, signer = said_state(hearing, "state_holder"), hearing.headers["state_holder"].fields.sender
    if {signer, *(header.fields.sender for header in headers)} != {verdict.party}:
        raise hearing.refuse(f"accuses {verdict.party}, who did not sign all of it: the wrong party is named")
    first, _ = hearing.said(names[0], Bulk)
    about = first.model_copy(update={"stage": verdict.stage, "step": verdict.step, "purpose": "update"})
    if state is None or state.step != verdict.step or not is_whole_transfer(headers, about):
        raise hearing.refuse("its headers are not those of one transfer of the stage's weights after that step")
    weights = {
        name.removeprefix(STAGE_PREFIX): tensor
        for name, tensor in hearing.tensors.items()
        if name.startswith(STAGE_PREFIX)
    }
    what = "sent other weights than those whose digest it signed"
    if not weights:
        return {"weights": hearing.record.weights_left_out}, "which weights were sent: they are not in this file", what
    if [digest_hex(*part) for _, _, part in parts(weights)] != [header.fields.payload_digest for header in headers]:
        raise hearing.refuse(f"its weights are not those that {verdict.party} sent")
    if tensors_digest(weights) == trained_digest(state):
        raise hearing.refuse(f"the weights that {verdict.party} sent have the digest that it signed: it is not guilty")
    return {"weights": "sent in signed parts; their digest is not the signed one"}, None, what
