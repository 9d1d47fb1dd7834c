"""A bench of masking a frozen linear layer: its cost and its error beside the plain layer, part by part.

``python -m phalanx.lab.bench.alone.masked OUT.json [--rounds 9] [--note TEXT]``

One thread. In each round every part runs once, in turns, so that a machine that gets busier slows all of them. Rows
hold medians over the rounds in milliseconds, of wall time and of this process's CPU time. `plain_*` is one product
``x @ W`` in torch. `send` quantises and masks, `worker` is the exact product mod p (as much again makes the product of
the pad, in idle time or at a second worker), `check` judges it, `receive` is check, unmasking and decoding. `pad` and
`pad_os` draw a pad (AES-256-CTR, the operating system). `online` is `send` and `receive`: what the trusted side does
while the step waits. `reduce` and `reduce_int64` bring one product back to residues, as here and by 64-bit division.
"""

import os
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from phalanx.lab.bench.measure.harness import median_ratio, print_progress, run_program, time_turns
from phalanx.lab.bench.measure.machine import describe_machine
from phalanx.security.mask import (
    AesPads,
    MaskedProduct,
    MaskedWorker,
    OsPads,
    P,
    PadLedger,
    begin_ledger,
    masked_linear,
    worst_error,
)
from phalanx.security.mask.ring import LIMIT, reduce_mod_p

SIZES = ((128, 256, 1024), (512, 768, 768), (512, 768, 3072), (512, 2048, 2048), (512, 4096, 1024))
"""Rows, inner dimension, columns; the first is of `phalanx bench split`."""


class MemoryLedgerStore:
    """A store that keeps the ledger of pads for as long as the bench runs."""

    data: bytes | None = None

    def read_record(self) -> bytes | None:
        """What was written last."""
        return self.data

    def write_record(self, data: bytes) -> None:
        """Keep it."""
        self.data = data


class MaskedParts:
    """One size, each of its parts a function that can be timed."""

    def __init__(self, rows: int, inner: int, columns: int) -> None:
        rng = np.random.default_rng(0)
        self.x = rng.standard_normal((rows, inner)).astype(np.float32)
        self.weight = (rng.standard_normal((inner, columns)) / inner**0.5).astype(np.float32)
        master, memory = os.urandom(32), MemoryLedgerStore()
        begin_ledger(memory, master, "bench")
        ledger = PadLedger(memory, master, "bench")
        pads = AesPads(ledger, master, ("bench",))
        self.side: MaskedProduct = masked_linear("layer", self.weight, rows, lambda product: pads).forward
        self.worker = MaskedWorker()
        self.worker.load_matrix(self.side.product, self.side.weight.values)
        self.side.pool.make_pad()
        self.sent = self.side.mask_rows(self.x)
        self.answer = self.worker.answer_request(self.sent.request)
        self.received = self.side.unmask_answer(self.sent, self.answer)
        self._sums = rng.integers(-LIMIT, LIMIT, (rows, columns)).astype(np.float64)
        self._pads, self._os_pads, self._size = pads, OsPads(), (rows, inner)

    def part_functions(self) -> dict[str, Callable[[], object]]:
        """The parts by name."""
        x, w = torch.from_numpy(self.x), torch.from_numpy(self.weight)
        x64, w64, x16, w16 = x.double(), w.double(), x.bfloat16(), w.bfloat16()
        request, values = self.sent.request, self.answer.values
        return {
            "plain_fp32": lambda: x @ w,
            "plain_fp64": lambda: x64 @ w64,
            "plain_bf16": lambda: x16 @ w16,
            "send": lambda: self.side.mask_rows(self.x),
            "worker": lambda: self.worker.answer_request(request),
            "check": lambda: self.side.check.require_product(request.values, values, "bench"),
            "receive": lambda: self.side.unmask_answer(self.sent, self.answer),
            "pad": lambda: self._pads.draw_pad(*self._size),
            "pad_os": lambda: self._os_pads.draw_pad(*self._size),
            "reduce": lambda: reduce_mod_p(self._sums),
            "reduce_int64": lambda: (self._sums.astype(np.int64) % P).astype(np.uint32),
        }

    def relative_errors(self) -> dict[str, float]:
        """Relative to float64, over the whole product."""
        exact = self.x.astype(np.float64) @ self.weight.astype(np.float64)
        scale = np.linalg.norm(exact)
        half = (torch.from_numpy(self.x).bfloat16() @ torch.from_numpy(self.weight).bfloat16()).double().numpy()
        lengths = np.linalg.norm(self.x, axis=1)[:, None] * np.linalg.norm(self.weight, axis=0)
        return {
            "error_masked": float(np.linalg.norm(self.received - exact) / scale),
            "error_fp32": float(np.linalg.norm(self.x @ self.weight - exact) / scale),
            "error_bf16": float(np.linalg.norm(half - exact) / scale),
            "worst_share_masked": float((np.abs(self.received - exact) / lengths).max()),
            "worst_share_allowed": worst_error(self.x.shape[1]),
        }


def measure_size(size: tuple[int, int, int], rounds: int) -> dict[str, Any]:
    """Measure one size."""
    parts = MaskedParts(*size)
    functions = parts.part_functions()

    def prepare(name: str) -> None:
        if name == "send":
            parts.side.pool.make_pad()

    times = time_turns(functions, rounds, before=prepare)
    wall = {name: [1e3 * sample.wall_s for sample in samples] for name, samples in times.items()}
    cpu = {name: [1e3 * sample.cpu_s for sample in samples] for name, samples in times.items()}
    rows, inner, columns = size
    cpu_ms = {name: statistics.median(values) for name, values in cpu.items()}
    online = [send + receive for send, receive in zip(cpu["send"], cpu["receive"], strict=True)]
    return {
        "rows": rows,
        "inner": inner,
        "columns": columns,
        "wall_ms": {name: statistics.median(values) for name, values in wall.items()},
        "cpu_ms": cpu_ms,
        "online_cpu_ms": statistics.median(online),
        "online_of_plain_fp32": median_ratio(online, cpu["plain_fp32"]),
        "check_of_plain_fp32": median_ratio(cpu["check"], cpu["plain_fp32"]),
        "worker_of_plain_fp32": median_ratio(cpu["worker"], cpu["plain_fp32"]),
        "worker_of_plain_fp64": median_ratio(cpu["worker"], cpu["plain_fp64"]),
        "bytes_to_worker": 4 * rows * inner,
        "bytes_from_worker": 4 * rows * columns,
        **parts.relative_errors(),
    }


def measure_masked(rounds: int = 9, note: str | None = None) -> dict[str, Any]:
    """All sizes."""
    torch.set_num_threads(1)
    rows = []
    for size in SIZES:
        rows.append(measure_size(size, rounds))
        print_progress(f"{size}: {rows[-1]['cpu_ms']}")
    return {"machine": describe_machine() | {"numpy": np.__version__}, "note": note, "rounds": rounds, "rows": rows}


if __name__ == "__main__":
    run_program("masked", measure_masked)
