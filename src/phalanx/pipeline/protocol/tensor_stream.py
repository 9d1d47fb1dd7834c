"""Many tensors as one stream of frames; names, shapes and types are the receiver's own, never the sender's."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy
import torch
from blake3 import blake3
from torch import Tensor

from phalanx.errors import FrameError, SignatureError
from phalanx.pipeline.config import OWNER
from phalanx.pipeline.plan import BOUNDARY_DTYPE, StepPlan
from phalanx.pipeline.protocol.message import Message
from phalanx.pipeline.protocol.messages import Activation, Bulk, FetchBulk, GradientHeld, PassedOnHeader
from phalanx.pipeline.protocol.signed import Link, Statement, StatementReader
from phalanx.security.crypto import digest_hex
from phalanx.transport import SignedHeader
from phalanx.transport.tensors import tensor_buffers

PART_BYTES = 4 * 2**20
"""Of one frame: larger ones outgrow caches and cost more CPU a byte, smaller ones are signed too often."""

Post = Callable[[str, Message, Sequence[memoryview]], SignedHeader | None]
"""Sends a message; returns its signed header, or None when the receiver is the sender itself."""


def send_bulk(post: Post, receiver: str, about: FetchBulk, tensors: Mapping[str, Tensor], num_steps: int) -> str:
    """Send tensors, part by part.

    Returns:
        The digest of the whole transfer, from the digests that the frames carry anyway.
    """
    digests = []
    for message, part in bulk_messages(about, tensors, num_steps):
        header = post(receiver, message, part)
        digests.append(digest_hex(*part) if header is None else header.fields.payload_digest)
    return digest_of_parts(digests)


def bulk_messages(
    about: FetchBulk, tensors: Mapping[str, Tensor], num_steps: int
) -> Iterator[tuple[Bulk, list[memoryview]]]:
    """Yield the messages of a transfer, each with its payload."""
    answered = about.model_dump(include={"epoch", "stage", "purpose", "request"})
    for offset, total, part in cut_parts(tensors):
        yield Bulk(**answered, step=num_steps, offset=offset, total=total), part


def digest_of_parts(digests: Sequence[str]) -> str:
    """The digest of a transfer, from the digests of its parts."""
    return digest_hex("\n".join(digests).encode())


def transfer_digest(tensors: Mapping[str, Tensor]) -> str:
    """The digest that a transfer of these tensors would have."""
    return digest_of_parts([digest_hex(*part) for _, _, part in cut_parts(tensors)])


def cut_parts(tensors: Mapping[str, Tensor]) -> Iterator[tuple[int, int, list[memoryview]]]:
    """Cut tensors, in order of name, into parts.

    Yields:
        ``(offset, total, buffers)`` in bytes; buffers are views, nothing is copied.
    """
    buffers = [tensor_buffers(tensors[name]) for name in sorted(tensors)]
    total = sum(len(buffer) for buffer in buffers)
    start, size, part = 0, 0, list[memoryview]()
    for buffer in buffers:
        position = 0
        while position < len(buffer):
            piece = buffer[position : position + PART_BYTES - size]
            part.append(piece)
            size += len(piece)
            position += len(piece)
            if size == PART_BYTES:
                yield start, total, part
                start, size, part = start + size, 0, []
    if part or total == 0:
        yield start, total, part


def tensors_digest(tensors: Mapping[str, Tensor], names: Iterable[str] | None = None) -> str:
    """BLAKE3 over names, shapes, types and bytes in order of name, hex.

    Args:
        tensors: Each is read once, and none is kept.
        names: Names to include; all when left out.
    """
    hasher = blake3()
    for name in sorted(tensors if names is None else names):
        tensor = tensors[name]
        hasher.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        hasher.update(tensor_buffers(tensor))
    return hasher.hexdigest()


class BulkReceiver:
    """The receiver of one transfer: its parts become tensors of known names and shapes, each in its own memory."""

    def __init__(self, expected: Mapping[str, Tensor]) -> None:
        """Make room.

        Args:
            expected: Names, shapes and types; values are not read and may be on the meta device.
        """
        self._tensors = {
            name: torch.empty(expected[name].shape, dtype=expected[name].dtype) for name in sorted(expected)
        }
        self._buffers = [tensor.view(-1).view(torch.uint8).numpy() for tensor in self._tensors.values()]
        self.total = sum(len(room) for room in self._buffers)
        self._filled = 0
        self._buffer_index, self._position = 0, 0
        self._done = False

    def add_part(self, offset: int, total: int, payload: memoryview) -> dict[str, Tensor] | None:
        """Take the next part.

        Returns:
            All tensors once the last part is in, else None.

        Raises:
            FrameError: The part does not follow the last one, has another length than it must have (a trickle of small
                ones could go on for ever), or another total.
        """
        due = min(PART_BYTES, self.total - self._filled)
        if (offset, total, len(payload)) != (self._filled, self.total, due) or self._done:
            raise FrameError(
                f"bulk part at {offset} of {total} bytes ({len(payload)} long): "
                f"expected {due} bytes at {self._filled} of {self.total}"
            )
        taken = 0
        data = numpy.frombuffer(payload, dtype=numpy.uint8)
        while taken < len(data):
            room = self._buffers[self._buffer_index]
            size = min(len(room) - self._position, len(data) - taken)
            room[self._position : self._position + size] = data[taken : taken + size]
            taken += size
            self._position += size
            if self._position == len(room):
                self._buffer_index, self._position = self._buffer_index + 1, 0
        self._filled += taken
        if self._filled < self.total:
            return None
        self._done = True
        return self._tensors


def may_continue(begun_by: str, sender: str, offset: int) -> bool:
    """Whether a part belongs to the transfer under way, or may begin it anew.

    Parts that the owner hands on are not mixed with late parts of the original sender: a shadow could not prove which
    of the two sent a mixture. Once the owner has begun a transfer, only its parts count.

    Args:
        begun_by: Sender of the first part; empty when there was none.
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
    statements: StatementReader, shown: Sequence[PassedOnHeader], about: Bulk, link: Link
) -> list[Statement[Bulk]] | None:
    """Return the parts of a transfer that a party shows.

    Args:
        shown: Headers of the parts, in order.
        about: The sent transfer; its offset and total are not read.
        link: Sender and receiver that they must have.

    Returns:
        None unless they are the whole of it: parts of another session, attempt, sender or receiver, or of another
        transfer, prove nothing about this one.
    """
    place = {"step": about.step, "stage": about.stage, "purpose": about.purpose}
    try:
        parts = [statements.open_statement(part, Bulk, about.epoch, place, lambda bulk: link) for part in shown]
    except (FrameError, SignatureError):
        return None
    return parts if is_whole_transfer(parts, about) else None


def sent_gradient(statements: StatementReader, held: GradientHeld, link: Link) -> str | None:
    """The digest of the weight gradient that a server sent, from the headers that `held` shows; None without them."""
    place = {"epoch": held.epoch, "step": held.step, "stage": held.stage}
    transfer = Bulk.model_validate({**place, "purpose": "gradient", "offset": 0, "total": 0})
    parts = whole_transfer(statements, held.parts, transfer, link)
    return None if parts is None else digest_of_parts([part.payload_digest for part in parts])


def announces_a_boundary(said: Statement[Activation], plan: StepPlan) -> bool:
    """Whether a header announces a tensor of the shape, type and size that the plan has between stages."""
    right = (plan.hidden_shape, str(BOUNDARY_DTYPE).removeprefix("torch."), plan.hidden_bytes)
    return (said.message.shape, said.message.dtype, said.size_bytes) == right
