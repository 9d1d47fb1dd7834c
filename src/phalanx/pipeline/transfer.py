"""What the signed parts of a transfer prove about the tensors that were sent."""

from collections.abc import Sequence

from phalanx.errors import FrameError
from phalanx.pipeline.bulk import digest_of_parts
from phalanx.pipeline.config import OWNER
from phalanx.pipeline.messages import Bulk, GradientHeld, parse_message
from phalanx.transport import SignedHeader


def may_continue(begun_by: str, sender: str, offset: int) -> bool:
    """Whether a part belongs to the transfer under way, or may begin it anew.

    What the owner hands on is not mixed with late parts of who should have sent it: a shadow could not prove by whose
    hand a mixture came. Once the owner has begun, it is the owner's.

    Args:
        begun_by: Who sent the first part; empty when there was none.
        sender: Of this part.
        offset: Of this part, bytes.
    """
    if offset == 0:
        return sender == OWNER or begun_by != OWNER
    return sender == begun_by


def is_whole_transfer(parts: Sequence[SignedHeader], about: Bulk) -> bool:
    """Whether headers are those of one whole transfer, in order; offset and total of `about` are not read."""
    position, totals = 0, set()
    for part in parts:
        try:
            message = parse_message(part.fields.kind, part.fields.body)
        except FrameError:
            return False
        if not isinstance(message, Bulk):
            return False
        if message != about.model_copy(update={"offset": position, "total": message.total}):
            return False
        totals.add(message.total)
        position += part.fields.payload_size
    return totals == {position}


def sent_gradient(parts: Sequence[SignedHeader], held: GradientHeld) -> str | None:
    """The digest of the weight gradient that a server sent, from the headers of its parts.

    Args:
        parts: Their signatures have been checked.
        held: Who shows them says this about the gradient.

    Returns:
        The digest; None when the parts are not the whole transfer of this gradient, in this attempt: old ones,
        or parts of another transfer, prove nothing about what was sent now.
    """
    place = {"epoch": held.epoch, "step": held.step, "stage": held.stage, "lane": held.lane}
    about = Bulk.model_validate({**place, "purpose": "gradient", "offset": 0, "total": 0})
    if not is_whole_transfer(parts, about):
        return None
    return digest_of_parts([part.fields.payload_digest for part in parts])
