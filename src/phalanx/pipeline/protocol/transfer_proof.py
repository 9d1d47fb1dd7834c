"""Proofs of transfers: what the signed parts of one prove about the tensors that were sent."""

from collections.abc import Sequence

from phalanx.pipeline.config import OWNER
from phalanx.pipeline.plan import BOUNDARY_DTYPE, StepPlan
from phalanx.pipeline.protocol.messages import Activation, Bulk, GradientHeld, PassedOnHeader
from phalanx.pipeline.protocol.signed import Link, Statement, Statements
from phalanx.pipeline.protocol.tensor_stream import digest_of_parts


def may_continue(begun_by: str, sender: str, offset: int) -> bool:
    """Whether a part belongs to the transfer under way, or may begin it anew.

    Parts that the owner hands on are not mixed with late parts of the original sender: a shadow could not prove which
    of the two sent a mixture. Once the owner has begun a transfer, only its parts count.

    Args:
        begun_by: Sender of the first part; empty when there was none.
        sender: Of this part.
        offset: Of this part, bytes.
    """
    if offset == 0:
        return sender == OWNER or begun_by != OWNER
    return sender == begun_by


def is_whole_transfer(parts: Sequence[Statement[Bulk]], about: Bulk) -> bool:
    """Whether statements are those of one whole transfer, in order; offset and total of `about` are not read."""
    position, totals = 0, set()
    for part in parts:
        message = part.message
        if message != about.model_copy(update={"offset": position, "total": message.total}):
            return False
        totals.add(message.total)
        position += part.size_bytes
    return totals == {position}


def whole_transfer(
    statements: Statements, shown: Sequence[PassedOnHeader], about: Bulk, link: Link
) -> list[Statement[Bulk]] | None:
    """Return the parts of a transfer that a party shows.

    Args:
        statements: Opens them.
        shown: Headers of the parts, in order.
        about: What was sent; its offset and total are not read.
        link: Sender and receiver that they must have.

    Returns:
        None unless they are the whole of it: parts of another session, attempt, sender or receiver, or of another
        transfer, prove nothing about what was sent now.
    """
    place = {"step": about.step, "stage": about.stage, "lane": about.lane, "purpose": about.purpose}
    found = [statements.find(part, Bulk, about.epoch, place, lambda bulk: link) for part in shown]
    parts = [part for part in found if part is not None]
    return parts if len(parts) == len(found) and is_whole_transfer(parts, about) else None


def sent_gradient(statements: Statements, held: GradientHeld, link: Link) -> str | None:
    """The digest of the weight gradient that a server sent, from the headers that `held` shows; None without them."""
    place = {"epoch": held.epoch, "step": held.step, "stage": held.stage, "lane": held.lane}
    about = Bulk.model_validate({**place, "purpose": "gradient", "offset": 0, "total": 0})
    parts = whole_transfer(statements, held.parts, about, link)
    return None if parts is None else digest_of_parts([part.digest for part in parts])


def announces_a_boundary(said: Statement[Activation], plan: StepPlan) -> bool:
    """Whether a header announces a tensor of the shape, type and size that the plan has between stages."""
    right = (plan.hidden_shape, str(BOUNDARY_DTYPE).removeprefix("torch."), plan.hidden_bytes)
    return (said.message.shape, said.message.dtype, said.size_bytes) == right
