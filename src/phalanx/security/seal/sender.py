"""A channel: the sealing end and the opening end that came out of one handshake."""

from collections.abc import Callable
from typing import NoReturn

from cryptography.exceptions import InvalidTag

from phalanx.closing import Closeable
from phalanx.errors import SealError
from phalanx.security.seal.context import Context
from phalanx.security.seal.direction import DirectionEnd, Readable, Writable, flat_view, frame_size
from phalanx.security.seal.header import TAG_BYTES, FrameHeader, SealRefusal, parse_header
from phalanx.security.seal.keys import wipe_buffer
from phalanx.security.seal.tensor import TensorKind


class Sender(DirectionEnd):
    """A sender that seals the frames of one direction.

    A frame that is lost on the way is sent again as the same bytes; sealing its tensor again makes another frame, which
    the receiver refuses as out of order.

    Guarantees:
        Takes a counter before it encrypts with it and never gives it back: whatever fails in between closes the
        sender. Refuses to work in a forked process. Safe to use from several threads; frames must be sent in the order
        in which they were sealed.
    """

    def frame_size(self, kind: TensorKind) -> int:
        """Return the bytes of a frame that holds such a tensor."""
        return frame_size(kind, self._direction_state.context.terms.chunk_bytes)

    def seal_tensor(self, kind: TensorKind, step: int, microbatch: int, data: Readable) -> bytearray:
        """Return the frame of a tensor; as `seal_into` with a new buffer."""
        frame = bytearray(self.frame_size(kind))
        self.seal_into(kind, step, microbatch, data, frame)
        return frame

    def seal_into(self, kind: TensorKind, step: int, microbatch: int, data: Readable, frame: Writable) -> None:
        """Encrypt a tensor from its own memory into a frame; the only pass over its bytes.

        Args:
            data: Contiguous memory of exactly ``kind.size_bytes``.
            frame: Exactly `frame_size` bytes; does not overlap with `data`.

        Raises:
            SealError: A size or number is wrong, or the lane is exhausted, closed or forked. Where nothing
                was encrypted the sender is as it was before.
        """
        lane, plain, out = self._direction_state, flat_view(data, f"tensor {kind.name}"), flat_view(frame, "frame")
        with lane.lock:
            cipher, clock = lane.cipher_for(kind.purpose), lane.clock
            header = lane.next_header(kind, step, microbatch)
            encoded = header.encode_header()
            size = len(encoded) + kind.size_bytes + TAG_BYTES * header.chunks
            if plain.nbytes != kind.size_bytes or out.nbytes != size or out.readonly:
                raise SealError(
                    SealRefusal.MALFORMED,
                    f"tensor {kind}: {plain.nbytes} bytes into a frame of {out.nbytes}, expected {kind.size_bytes} "
                    f"into {size} that can be written",
                )
            lane.check_counters_left(header.chunks)
            lane.counter += header.chunks
            try:
                associated, chunk_bytes, position = lane.associated_data(encoded), header.chunk_bytes, len(encoded)
                out[:position] = encoded
                for index in range(header.chunks):
                    chunk = plain[index * chunk_bytes : (index + 1) * chunk_bytes]
                    stop = position + chunk.nbytes + TAG_BYTES
                    nonce, extra = lane.chunk_nonce(header.counter + index), associated + index.to_bytes(4, "big")
                    started = clock() if clock is not None else 0.0
                    cipher.encrypt_into(nonce, chunk, extra, out[position:stop])
                    if clock is not None:
                        lane.cipher_seconds += clock() - started
                    position = stop
            except BaseException:
                # the receiver waits for counters that are gone
                lane.close()
                raise


class Receiver(DirectionEnd):
    """A receiver that opens the frames of one direction, each once, in the order in which they were sealed.

    Guarantees:
        A refused frame changes nothing: the due frame is still accepted afterwards. Nothing of a refused frame is left
        in the buffer. Safe to use from several threads.
    """

    def open_tensor(self, frame: Readable, kind: TensorKind, step: int, microbatch: int) -> bytearray:
        """Return the plain tensor; as `open_into` with a new buffer."""
        self.check_size(frame, kind, step, microbatch)
        plain = bytearray(kind.size_bytes)
        self.open_into(frame, kind, step, microbatch, plain)
        return plain

    def check_size(self, frame: Readable, kind: TensorKind, step: int, microbatch: int) -> None:
        """Check that a frame has the expected size, before memory is allocated for its tensor.

        Raises:
            SealError: It has another one; `reason` names the difference.
        """
        lane, view = self._direction_state, flat_view(frame, "frame")
        size = frame_size(kind, lane.context.terms.chunk_bytes)
        if view.nbytes != size:
            with lane.lock:
                _explain_refusal(view, lane.next_header(kind, step, microbatch), size)

    def open_into(self, frame: Readable, kind: TensorKind, step: int, microbatch: int, plain: Writable) -> None:
        """Decrypt the frame that is due into memory of the caller; the only pass over its bytes.

        Args:
            plain: Contiguous memory of exactly ``kind.size_bytes``; zeros where the frame is refused half-way.

        Raises:
            SealError: It is any other frame, or altered; `reason` tells which. Or the lane is closed or forked.
        """
        lane, view, out = self._direction_state, flat_view(frame, "frame"), flat_view(plain, f"tensor {kind.name}")
        if out.nbytes != kind.size_bytes or out.readonly:
            raise SealError(SealRefusal.MALFORMED, f"tensor {kind}: to {out.nbytes} bytes, expected {kind.size_bytes}")
        with lane.lock:
            cipher, clock = lane.cipher_for(kind.purpose), lane.clock
            header = lane.next_header(kind, step, microbatch)
            # what is authenticated is what this side expects; the peer's header is only compared with it
            encoded = header.encode_header()
            size = len(encoded) + kind.size_bytes + TAG_BYTES * header.chunks
            if view.nbytes != size or view[: len(encoded)] != encoded:
                _explain_refusal(view, header, size)
            lane.check_counters_left(header.chunks)
            try:
                associated, chunk_bytes, position = lane.associated_data(encoded), header.chunk_bytes, len(encoded)
                for index in range(header.chunks):
                    chunk = out[index * chunk_bytes : (index + 1) * chunk_bytes]
                    stop = position + chunk.nbytes + TAG_BYTES
                    nonce, extra = lane.chunk_nonce(header.counter + index), associated + index.to_bytes(4, "big")
                    started = clock() if clock is not None else 0.0
                    cipher.decrypt_into(nonce, view[position:stop], extra, chunk)
                    if clock is not None:
                        lane.cipher_seconds += clock() - started
                    position = stop
            except InvalidTag as exc:
                wipe_buffer(out)
                raise SealError(
                    SealRefusal.ALTERED, f"frame {header.counter}: chunk {index} of {header.chunks} does not open"
                ) from exc
            except BaseException:
                wipe_buffer(out)
                raise
            lane.counter += header.chunks


def _explain_refusal(frame: memoryview, due: FrameHeader, size: int) -> NoReturn:
    """Raise the reason for which a frame is not the due frame."""
    header, _ = parse_header(frame)
    _compare_headers(header, due)
    if header != due:
        raise SealError(
            SealRefusal.OTHER_TENSOR, f"frame: holds {_describe_header(header)}, due is {_describe_header(due)}"
        )
    _explain_size(frame.nbytes, size)
    raise SealError(SealRefusal.MALFORMED, "frame: is not the one that is due")


def _explain_size(size: int, due: int) -> None:
    if size < due:
        raise SealError(SealRefusal.TRUNCATED, f"frame: {size} bytes, expected {due}")
    if size > due:
        raise SealError(SealRefusal.TOO_LONG, f"frame: {size} bytes, expected {due}")


def _compare_headers(header: FrameHeader, due: FrameHeader) -> None:
    if header.session != due.session:
        raise SealError(SealRefusal.FOREIGN_SESSION, "frame: belongs to another session than this channel")
    if header.direction != due.direction:
        raise SealError(
            SealRefusal.FOREIGN_DIRECTION, "frame: goes the other way; it was sent back to where it came from"
        )
    if header.epoch != due.epoch:
        raise SealError(
            SealRefusal.FOREIGN_EPOCH, f"frame: of epoch {header.epoch}, this channel is of epoch {due.epoch}"
        )
    if header.counter < due.counter:
        raise SealError(SealRefusal.REPLAYED, f"frame: number {header.counter} was here before, due is {due.counter}")
    if header.counter > due.counter:
        raise SealError(SealRefusal.OUT_OF_ORDER, f"frame: number {header.counter} is too early, due is {due.counter}")


def _describe_header(header: FrameHeader) -> str:
    kind = TensorKind.from_bytes(header.kind)
    return f"{kind} of step {header.step}, microbatch {header.microbatch}, {header.chunks} x {header.chunk_bytes} bytes"


class Channel(Closeable):
    """One end of a channel in one pair of epochs."""

    def __init__(self, context: Context, sender: Sender, receiver: Receiver) -> None:
        self.context, self.sender, self.receiver = context, sender, receiver

    @property
    def cipher_seconds(self) -> float:
        """Seconds in the ciphers of both directions so far, by the clock of `time_ciphers`; 0 without a clock."""
        return self.sender.cipher_seconds + self.receiver.cipher_seconds

    def time_ciphers(self, clock: Callable[[], float]) -> None:
        """Read a clock, such as `time.thread_time`, before and after each call of a cipher from now on."""
        self.sender.time_cipher(clock)
        self.receiver.time_cipher(clock)

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()

    def __repr__(self) -> str:
        return f"Channel(sends in epoch {self.sender.sender_epoch}, receives in epoch {self.receiver.sender_epoch})"
