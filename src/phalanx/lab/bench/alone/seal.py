"""A bench of sealed frames beside bare AES-256-GCM: both take turns on one core.

``python -m phalanx.lab.bench.alone.seal OUT.json [--seconds 60] [--note TEXT]``

A turn seals tensors into frames and opens them again, one after the other, and does the same with the bare cipher, one
call each, into memory that exists already; the order of the two alternates. The share is the bare cipher's time by the
frames', of the same turn without its first frame; processor time of the thread, as other work on the machine stretches
wall time. The first frame of the arm that begins is the `cold` one: code and buffers have left the caches meanwhile.
Digests for the transcript (BLAKE3 over the frame) are timed apart: the transport makes them anyway.
"""

import itertools
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from phalanx.lab.bench.measure.harness import CallTime, run_program, time_call
from phalanx.security.crypto import Identity, digest_hex
from phalanx.security.seal import Channel, HandshakeOffer, Purpose, TensorKind, Terms, answer_hello

MIB = 2**20
LAYOUTS = ((1, 1), (2, 1), (2, 2), (4, 1), (4, 4), (8, 1), (8, 8))
"""MiB of a tensor, and of a chunk."""
REPEATS = 9
"""Frames of a turn, the cold one among them."""
Times = dict[str, list[CallTime]]
"""Seconds of each frame, by what was done."""


class FixedEpoch:
    """A counter of epochs for a benchmark, which starts once."""

    def raise_epoch(self) -> int:
        """Give the first epoch."""
        return 1


def shake_hands(chunk_bytes: int) -> tuple[Channel, Channel]:
    """Return both ends of a channel in this process."""
    terms = Terms("bench", b"\1" * 32, b"\2" * 32, "client", "enclave", chunk_bytes)
    client, server = Identity.without_certificate("client"), Identity.without_certificate("enclave")
    offer = HandshakeOffer(terms, client, FixedEpoch())
    reply, ours = answer_hello(offer.hello, terms, server, FixedEpoch(), client.public)
    return offer.accept_reply(reply, server.public), ours


class SealArms:
    """The four things that take turns, on buffers of one size."""

    def __init__(self, size_mib: int, chunk_mib: int) -> None:
        self.size_bytes, self._step = size_mib * MIB, 0
        self._client, self._server = shake_hands(chunk_mib * MIB)
        self._kind = TensorKind(Purpose.ACTIVATION, "cut", "bfloat16", (self.size_bytes // 2,))
        self._plain, self._out = bytearray(b"\5" * self.size_bytes), bytearray(self.size_bytes)
        self.frame = bytearray(self._client.sender.frame_size(self._kind))
        self._cipher, self._bare = AESGCM(b"\3" * 32), bytearray(self.size_bytes + 16)

    def run_turn(self, *, frames_first: bool) -> Times:
        """Let both have their frames, and digest as many."""
        times: Times = {}
        for ours in (True, False) if frames_first else (False, True):
            for _ in range(REPEATS):
                self._step += 1
                for name, action in (self._frame_calls() if ours else self._bare_calls()).items():
                    times.setdefault(name, []).append(time_call(action, time.thread_time))
        digest = partial(digest_hex, memoryview(self.frame))
        times["digest"] = [time_call(digest, time.thread_time) for _ in range(REPEATS)]
        return times

    def _frame_calls(self) -> dict[str, Callable[[], object]]:
        return {
            "seal": lambda: self._client.sender.seal_into(self._kind, self._step, 0, self._plain, self.frame),
            "open": lambda: self._server.receiver.open_into(self.frame, self._kind, self._step, 0, self._out),
        }

    def _bare_calls(self) -> dict[str, Callable[[], object]]:
        nonce = self._step.to_bytes(12, "big")
        return {
            "bare_encrypt": lambda: self._cipher.encrypt_into(nonce, self._plain, b"", self._bare),
            "bare_decrypt": lambda: self._cipher.decrypt_into(nonce, self._bare, b"", self._out),
        }


def measure_seal(seconds: float = 60.0, note: str | None = None) -> dict[str, Any]:
    """Give every size and chunking the same time, in turns of all of them."""
    arms = {layout: SealArms(*layout) for layout in LAYOUTS}
    turns_of_layout: dict[tuple[int, int], list[Times]] = {layout: [] for layout in LAYOUTS}
    for arm in arms.values():
        arm.run_turn(frames_first=True)
    until = time.monotonic() + seconds
    for round_number in itertools.count():
        if time.monotonic() > until:
            break
        for layout, arm in arms.items():
            turns_of_layout[layout].append(arm.run_turn(frames_first=round_number % 2 == 0))
    return {
        "note": note,
        "rows": [summarise_layout(layout, arms[layout], turns) for layout, turns in turns_of_layout.items()],
    }


def summarise_layout(layout: tuple[int, int], arms: SealArms, turns: list[Times]) -> dict[str, object]:
    """Summarize one layout: medians over turns, and the shares turn by turn."""
    gb = arms.size_bytes / 1e9
    cpu = {
        name: [sum(sample.cpu_s for sample in turn[name][1:]) / (REPEATS - 1) for turn in turns] for name in turns[0]
    }
    wall = {name: min(sample.wall_s for turn in turns for sample in turn[name]) for name in turns[0]}
    summary: dict[str, object] = {
        "tensor_mib": layout[0],
        "chunk_mib": layout[1],
        "turns": len(turns),
        "frames_per_turn": REPEATS,
        "frame_bytes": len(arms.frame),
        **{f"{name}_gb_per_cpu_s_median": gb / statistics.median(cpu[name]) for name in cpu},
        **{f"{name}_gb_per_s_best_wall": gb / wall[name] for name in wall},
    }
    for ours, bare in (("seal", "bare_encrypt"), ("open", "bare_decrypt")):
        shares = [theirs / mine for theirs, mine in zip(cpu[bare], cpu[ours], strict=True)]
        summary[f"share_{ours}_median"] = statistics.median(shares)
        summary[f"share_{ours}_quartiles"] = statistics.quantiles(shares, n=4)
        # frames go first in every other turn, the bare cipher in the rest
        cold_ours = statistics.median(turn[ours][0].cpu_s for turn in turns[0::2])
        cold_bare = statistics.median(turn[bare][0].cpu_s for turn in turns[1::2])
        summary[f"share_{ours}_cold"] = cold_bare / cold_ours
    return summary


if __name__ == "__main__":
    run_program("seal", measure_seal)
