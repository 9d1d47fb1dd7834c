"""One end of what lies between a client and the enclave: tensors in, frames out, and back."""

import struct
import time
from typing import Protocol

import torch
from torch import Tensor

from phalanx.errors import FrameError, SealError
from phalanx.security.crypto import Identity, digest_hex
from phalanx.security.seal import Channel, TensorKind, Transcript
from phalanx.split.kinds import DTYPES
from phalanx.transport.tensors import tensor_buffers, tensor_memory

Frame = bytes | bytearray | memoryview
_PLAIN = struct.Struct(">4sQIH")
_MAGIC = b"PHSP"


class Link(Protocol):
    """One end, whatever protects it.

    Attributes:
        seconds: CPU time spent on cryptography so far.
    """

    seconds: float

    def pack(self, kind: TensorKind, step: int, microbatch: int, tensor: Tensor) -> bytearray:
        """Return the frame of a tensor of this kind, which lies contiguously on the CPU."""
        ...

    def unpack(self, frame: Frame, kind: TensorKind, step: int, microbatch: int) -> Tensor:
        """Return the tensor of a frame; of a refused one nothing is left, and the due one is still accepted.

        Raises:
            SealError: It is not the frame that is due.
            FrameError: The same, of a link that seals nothing.
        """
        ...

    def statement(self) -> bytes:
        """This side's signed word on all that has crossed; empty for a link that cannot tell."""
        ...

    def close(self) -> None:
        """Forget keys."""
        ...


class SealedLink:
    """Seals from a tensor's memory and opens into it, one pass each; notes every frame in the transcript.

    Args:
        channel: One end, used by nobody else.
        identity: This side.
    """

    def __init__(self, channel: Channel, identity: Identity) -> None:
        self.seconds = 0.0
        self._channel = channel
        self._transcript = Transcript(channel, identity)

    def pack(self, kind: TensorKind, step: int, microbatch: int, tensor: Tensor) -> bytearray:
        """As `Link` says."""
        started = time.thread_time()
        sender = self._channel.sender
        frame = bytearray(sender.frame_size(kind))
        sender.seal_into(kind, step, microbatch, tensor_buffers(tensor), frame)
        self._transcript.sent(digest_hex(memoryview(frame)))
        self.seconds += time.thread_time() - started
        return frame

    def unpack(self, frame: Frame, kind: TensorKind, step: int, microbatch: int) -> Tensor:
        """As `Link` says."""
        started = time.thread_time()
        tensor = torch.empty(kind.shape, dtype=DTYPES[kind.dtype])
        self._channel.receiver.open_into(frame, kind, step, microbatch, tensor_memory(tensor))
        self._transcript.received(digest_hex(memoryview(frame)))
        self.seconds += time.thread_time() - started
        return tensor

    def statement(self) -> bytes:
        """As `Link` says."""
        return self._transcript.sign()

    def close(self) -> None:
        """As `Link` says."""
        self._channel.close()


class PlainLink:
    """Seals nothing. NOT SECURE: whoever carries a frame reads it, and can put another one in its place.

    The victim of attacks, and what a sealed run is compared with.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    def pack(self, kind: TensorKind, step: int, microbatch: int, tensor: Tensor) -> bytearray:
        """As `Link` says."""
        header = _PLAIN.pack(_MAGIC, step, microbatch, len(kind.encoded)) + kind.encoded
        return bytearray(b"".join((header, tensor_buffers(tensor))))

    def unpack(self, frame: Frame, kind: TensorKind, step: int, microbatch: int) -> Tensor:
        """As `Link` says, of a frame that claims to be the one that is due."""
        header = _PLAIN.pack(_MAGIC, step, microbatch, len(kind.encoded)) + kind.encoded
        view = memoryview(frame)
        if view.nbytes != len(header) + kind.size_bytes or view[: len(header)] != header:
            raise FrameError(f"frame: is not {kind} of step {step}, microbatch {microbatch}")
        tensor = torch.empty(kind.shape, dtype=DTYPES[kind.dtype])
        tensor_memory(tensor)[:] = view[len(header) :]
        return tensor

    def statement(self) -> bytes:
        """Nothing: what crossed is nobody's word."""
        return b""

    def close(self) -> None:
        """There is nothing to forget."""


REFUSALS = (SealError, FrameError)
"""What `Link.unpack` raises."""
