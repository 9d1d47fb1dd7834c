"""Reading of token shards beside a plain memory map: the same windows, in the same random order, on one core."""

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.data.shards import (
    DatasetFacts,
    DatasetWriter,
    DocumentEntry,
    RecipeRecord,
    SealKey,
    SourceFacts,
    TokenizerRecord,
    TokenStream,
    open_dataset,
)
from phalanx.security.crypto import Identity

_VOCAB_SIZE = 50_000
_DOCUMENT = 1000
_GROUP = ("bench", "train")
Read = Callable[[int, int], NDArray[np.unsignedinteger]]


@dataclass(frozen=True)
class ReadingPlan:
    """What is read.

    Attributes:
        tokens: Number of tokens of the dataset, 2 bytes each; by default twice the cache of decrypted leaves.
        window: Tokens of one read, its last label included; every window is read once an epoch.
        leaf_bytes: Sizes of leaves that take turns.
        epochs: Passes of each reader; in the first one leaves are hashed.
    """

    tokens: int = 2**26
    window: int = 1025
    leaf_bytes: tuple[int, ...] = (2**16, 2**18, 2**20)
    epochs: int = 3


def measure_reading(plan: ReadingPlan | None = None) -> list[dict[str, Any]]:
    """Read each window once an epoch, in a random order, into int64 rows as a loader does.

    Returns:
        A row for each reader, leaf size and epoch: `reading` ("memory map", "verified", "encrypted"), `leaf_kib`,
        `epoch`, `tokens_per_s` and `gb_per_s` by processor time of the thread, and `leaf_read_us`, the median of those
        reads that are the epoch's first of a leaf. Pages are in memory: what is measured is the reading, not the disk.
    """
    plan = plan or ReadingPlan()
    rng = np.random.default_rng(1)
    ids = rng.integers(0, _VOCAB_SIZE, plan.tokens, dtype=np.int64).astype("<u2")
    order = rng.permutation((plan.tokens - 1) // (plan.window - 1))
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for leaf_bytes in plan.leaf_bytes:
            for reading, read in _open_readers(Path(name) / str(leaf_bytes), ids, leaf_bytes):
                for epoch in range(plan.epochs):
                    rows.append(
                        {"reading": reading, "leaf_kib": leaf_bytes // 1024, "epoch": epoch + 1}
                        | _read_epoch(read, order, plan.window, leaf_bytes)
                    )
    return rows


def _open_readers(home: Path, ids: NDArray[Any], leaf_bytes: int) -> Iterator[tuple[str, Read]]:
    home.mkdir()
    (home / "plain").write_bytes(ids.tobytes())
    plain = np.asarray(np.memmap(home / "plain", "<u2", "r"))
    # once through, so that every reader finds its pages in memory
    plain.sum()
    yield "memory map", lambda start, stop: plain[start:stop]
    key = SealKey.create_file(home / "key")
    for reading, seal in (("verified", None), ("encrypted", key)):
        stream = _write_dataset(home / reading, ids, leaf_bytes, seal)
        yield reading, stream.read_tokens


def _write_dataset(home: Path, ids: NDArray[Any], leaf_bytes: int, seal: SealKey | None) -> TokenStream:
    facts = DatasetFacts(
        sources=(SourceFacts(name="bench", kind="random", fingerprint="0" * 64),),
        tokenizer=TokenizerRecord(kind="none", vocab_size=_VOCAB_SIZE, eos_id=0, digest="0" * 64),
        recipe=RecipeRecord.from_content(""),
    )
    with DatasetWriter(home, "<u2", leaf_bytes=leaf_bytes, seal=seal) as writer:
        part = writer.part_writer(*_GROUP)
        for number, start in enumerate(range(0, len(ids), _DOCUMENT)):
            part.add_document(ids[start : start + _DOCUMENT], DocumentEntry(f"{number:064x}", 0, str(number)))
        writer.finish_dataset(facts, Identity.without_certificate("bench"))
    return open_dataset(home, key=seal).tokens(*_GROUP)


def _read_epoch(read: Read, order: NDArray[np.int64], window: int, leaf_bytes: int) -> dict[str, float]:
    row, step, seen, firsts = np.empty(window, np.int64), window - 1, set[int](), []
    began = time.thread_time_ns()
    for number in order.tolist():
        leaf = number * step * 2 // leaf_bytes
        if leaf in seen:
            row[:] = read(number * step, number * step + window)
            continue
        # asking for the time takes as long as a short read: only these are timed alone
        seen.add(leaf)
        before = time.thread_time_ns()
        row[:] = read(number * step, number * step + window)
        firsts.append(time.thread_time_ns() - before)
    seconds, tokens = (time.thread_time_ns() - began) / 1e9, len(order) * step
    return {
        "tokens_per_s": tokens / seconds,
        "gb_per_s": 2 * tokens / seconds / 1e9,
        "leaf_read_us": float(np.median(firsts)) / 1e3,
    }
