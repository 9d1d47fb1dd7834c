"""Sealing: tensors in, frames out, no nonce twice."""

from phalanx.errors import SealError
from phalanx.security.seal.direction import LaneEnd, Readable, Writable, flat, frame_size
from phalanx.security.seal.header import TAG_BYTES
from phalanx.security.seal.refusal import SealRefusal
from phalanx.security.seal.tensor import TensorKind


class Sender(LaneEnd):
    """A sender that seals the frames of one direction.

    A frame that is lost on the way is sent again as the same bytes; sealing its tensor again makes another frame, which
    the receiver refuses as out of order.

    Args:
        lane: Used by no other object.

    Guarantees:
        Takes a counter before it encrypts with it and never gives it back: whatever fails in between closes the
        sender. Refuses to work in a forked process. Safe to use from several threads; frames must be sent in the order
        in which they were sealed.
    """

    def frame_size(self, kind: TensorKind) -> int:
        """Return the bytes of a frame that holds such a tensor."""
        return frame_size(kind, self._lane.context.terms.chunk_bytes)

    def seal(self, kind: TensorKind, step: int, microbatch: int, data: Readable) -> bytearray:
        """Return the frame of a tensor; as `seal_into` with a new buffer."""
        frame = bytearray(self.frame_size(kind))
        self.seal_into(kind, step, microbatch, data, frame)
        return frame

    def seal_into(self, kind: TensorKind, step: int, microbatch: int, data: Readable, frame: Writable) -> None:
        """Encrypt a tensor from its own memory into a frame; the only pass over its bytes.

        Args:
            kind: What it is.
            step: Optimizer step.
            microbatch: Index in the step.
            data: Contiguous memory of exactly ``kind.size_bytes``.
            frame: Of exactly `frame_size` bytes; does not overlap with `data`.

        Raises:
            SealError: A size or number is wrong, or the lane is exhausted, closed or forked. Where nothing
                was encrypted the sender is as it was before.
        """
        lane, plain, out = self._lane, flat(data, f"tensor {kind.name}"), flat(frame, "frame")
        with lane.lock:
            cipher, clock = lane.cipher(kind.purpose), lane.clock
            header = lane.header(kind, step, microbatch)
            encoded = header.encode()
            size = len(encoded) + kind.size_bytes + TAG_BYTES * header.chunks
            if plain.nbytes != kind.size_bytes or out.nbytes != size or out.readonly:
                raise SealError(
                    SealRefusal.MALFORMED,
                    f"tensor {kind}: {plain.nbytes} bytes into a frame of {out.nbytes}, expected {kind.size_bytes} "
                    f"into {size} that can be written",
                )
            lane.check_room(header.chunks)
            lane.counter += header.chunks
            try:
                about, chunk_bytes, position = lane.about(encoded), header.chunk_bytes, len(encoded)
                out[:position] = encoded
                for index in range(header.chunks):
                    chunk = plain[index * chunk_bytes : (index + 1) * chunk_bytes]
                    end = position + chunk.nbytes + TAG_BYTES
                    nonce, extra = lane.nonce(header.counter + index), about + index.to_bytes(4, "big")
                    started = clock() if clock is not None else 0.0
                    cipher.encrypt_into(nonce, chunk, extra, out[position:end])
                    if clock is not None:
                        lane.cipher_seconds += clock() - started
                    position = end
            except BaseException:
                # the receiver waits for counters that are gone
                lane.close()
                raise
