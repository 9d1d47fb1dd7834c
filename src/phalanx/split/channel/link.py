"""Links between a client and the enclave: one end turns tensors into frames, the other frames into tensors."""

import struct
import time
from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from phalanx.errors import FrameError, SealError
from phalanx.security.crypto import Identity, digest_hex
from phalanx.security.seal import Channel, TensorKind, Transcript
from phalanx.split.channel.costs import Costs
from phalanx.split.channel.message import SplitMessage
from phalanx.split.channel.tensor_kinds import DTYPES
from phalanx.transport import Endpoint
from phalanx.transport.tensors import tensor_buffers, tensor_memory


class PackedFrame(bytearray):
    """A frame of a link.

    Attributes:
        digest: Its `digest_hex`, which the transport that signs it need not make again; empty where it was not made.
    """

    digest: str = ""


def post_message(endpoint: Endpoint, receiver: str, message: SplitMessage, frame: PackedFrame) -> None:
    """Send a message with a frame."""
    body, payload = message.model_dump(mode="json"), memoryview(frame)
    if frame.digest:
        endpoint.send_hashed(receiver, message.kind, body, payload, frame.digest)
    else:
        endpoint.send_frame(receiver, message.kind, body, (payload,))


Frame = bytes | bytearray | memoryview
_PLAIN = struct.Struct(">4sQIH")
_MAGIC = b"PHSP"


class FrameLink(Protocol):
    """One end, whatever protects it."""

    @property
    def link_costs(self) -> Costs:
        """CPU time so far."""

    def pack_tensor(self, kind: TensorKind, step: int, microbatch: int, tensor: Tensor) -> PackedFrame:
        """Return the frame of a tensor of this kind, which lies contiguously on the CPU."""

    def unpack_tensor(self, frame: Frame, kind: TensorKind, step: int, microbatch: int, digest: str = "") -> Tensor:
        """Return the tensor of a frame; of a refused one nothing is left, and the due one is still accepted.

        Args:
            digest: Digest of the frame where this process has computed it already; computed here when left out.
        """

    def signed_statement(self) -> bytes:
        """This side's signed word on all that has crossed; empty for a link that cannot tell."""

    def close(self) -> None:
        """Forget keys."""


class SealedLink:
    """A link that seals from a tensor's memory and opens into it, one pass each; notes every frame in the transcript.

    A frame is digested once at each end: the transcript notes the digest that the transport's header signs.

    Args:
        channel: One end, used by no other link.
    """

    def __init__(self, channel: Channel, identity: Identity) -> None:
        self._seconds, self._digest_seconds = 0.0, 0.0
        self._channel = channel
        self._transcript = Transcript(channel, identity)
        channel.time_ciphers(time.thread_time)

    @property
    def link_costs(self) -> Costs:
        """As `FrameLink` says."""
        cipher_s, digest_s = self._channel.cipher_seconds, self._digest_seconds
        framing_s = max(0.0, self._seconds - cipher_s - digest_s)
        return Costs(cipher_s=cipher_s, digest_s=digest_s, framing_s=framing_s)

    def pack_tensor(self, kind: TensorKind, step: int, microbatch: int, tensor: Tensor) -> PackedFrame:
        """As `FrameLink` says."""
        started = time.thread_time()
        sender = self._channel.sender
        frame = PackedFrame(sender.frame_size(kind))
        sender.seal_into(kind, step, microbatch, tensor_buffers(tensor), frame)
        frame.digest = self._hash_frame(frame)
        self._transcript.note_sent(frame.digest)
        self._seconds += time.thread_time() - started
        return frame

    def unpack_tensor(self, frame: Frame, kind: TensorKind, step: int, microbatch: int, digest: str = "") -> Tensor:
        """As `FrameLink` says."""
        started = time.thread_time()
        # how many rows a frame has is its sender's word, and memory is taken for no more than came
        self._channel.receiver.check_size(frame, kind, step, microbatch)
        tensor = torch.empty(kind.shape, dtype=DTYPES[kind.dtype])
        self._channel.receiver.open_into(frame, kind, step, microbatch, tensor_memory(tensor))
        self._transcript.note_received(digest or self._hash_frame(frame))
        self._seconds += time.thread_time() - started
        return tensor

    def _hash_frame(self, frame: Frame) -> str:
        started = time.thread_time()
        digest = digest_hex(memoryview(frame))
        self._digest_seconds += time.thread_time() - started
        return digest

    def signed_statement(self) -> bytes:
        """As `FrameLink` says."""
        return self._transcript.sign_transcript()

    def close(self) -> None:
        """As `FrameLink` says."""
        self._channel.close()


class PlainLink:
    """A link that seals nothing. NOT SECURE: a host that carries a frame can read it, and can replace it by another.

    It is the target of attacks, and the run that a sealed one is compared with.
    """

    @property
    def link_costs(self) -> Costs:
        """None."""
        return Costs()

    def pack_tensor(self, kind: TensorKind, step: int, microbatch: int, tensor: Tensor) -> PackedFrame:
        """As `FrameLink` says."""
        header = _PLAIN.pack(_MAGIC, step, microbatch, len(kind.encoded)) + kind.encoded
        frame = PackedFrame(header)
        frame += tensor_buffers(tensor)
        return frame

    def unpack_tensor(self, frame: Frame, kind: TensorKind, step: int, microbatch: int, digest: str = "") -> Tensor:
        """Open a frame that claims to be the due one; see `FrameLink`."""
        header = _PLAIN.pack(_MAGIC, step, microbatch, len(kind.encoded)) + kind.encoded
        view = memoryview(frame)
        if view.nbytes != len(header) + kind.size_bytes or view[: len(header)] != header:
            raise FrameError(f"frame: is not {kind} of step {step}, microbatch {microbatch}")
        tensor = torch.empty(kind.shape, dtype=DTYPES[kind.dtype])
        tensor_memory(tensor)[:] = view[len(header) :]
        return tensor

    def signed_statement(self) -> bytes:
        """Return nothing: no side has signed what crossed."""
        return b""

    def close(self) -> None:
        """There is nothing to forget."""


def costs_of(links: Iterable[FrameLink]) -> Costs:
    """What several links of this process have cost together."""
    total = Costs()
    for link in links:
        total = total.add_costs(link.link_costs)
    return total


REFUSALS = (SealError, FrameError)
"""What `FrameLink.unpack_tensor` raises."""
