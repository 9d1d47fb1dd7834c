"""Datasets of Megatron: a file of tokens and its index, written and read; nothing in an index is believed unchecked."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.data.shards.dataset import Dataset
from phalanx.errors import DataError

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_U2, _I4 = 8, 4


def write_megatron(dataset: Dataset, group: str, split: str, prefix: Path) -> tuple[Path, Path]:
    """Write one split of a group as ``PREFIX.bin`` and ``PREFIX.idx``, a sequence and a document for each document.

    Tokens are uint16, or int32 where they do not fit: the two types that Megatron itself writes.

    Raises:
        DataError: A document is longer, or an id larger, than 2^31 - 1; or the files are there, or cannot be written.
    """
    starts, tokens = dataset.document_starts(group, split), dataset.tokens(group, split)
    code = _U2 if tokens.dtype.itemsize == 2 else _I4
    stored = np.dtype(_DTYPES[code])
    lengths = np.diff(starts)
    if (lengths >= 2**31).any() or dataset.manifest.tokenizer.vocab_size > 2**31:
        raise DataError(f"{prefix}: Megatron has at most 31 bits for the length of a document and for an id")
    content, index = (prefix.with_name(prefix.name + ending) for ending in (".bin", ".idx"))
    try:
        with content.open("xb") as stream:
            for start in range(0, len(tokens), 2**22):
                stream.write(tokens[start : start + 2**22].astype(stored).tobytes())
        with index.open("xb") as stream:
            stream.write(_HEADER.pack(_MAGIC, 1, code, len(lengths), len(lengths) + 1))
            stream.write(lengths.astype("<i4").tobytes())
            stream.write((starts[:-1].astype("<i8") * stored.itemsize).tobytes())
            stream.write(np.arange(len(lengths) + 1, dtype="<i8").tobytes())
    except OSError as exc:
        raise DataError(f"{prefix}: cannot be written ({exc.strerror}); give another path") from exc
    return content, index


@dataclass(frozen=True)
class MegatronDataset:
    """A pair of files, checked against each other."""

    prefix: Path
    documents: int
    _sequences: NDArray[np.int64]
    _starts: NDArray[np.int64]
    _lengths: NDArray[np.int64]
    _tokens: NDArray[Any]

    def read_documents(self) -> Iterator[NDArray[Any]]:
        """Yield the tokens of every document, in order; its sequences are joined."""
        for first, stop in zip(self._sequences[:-1].tolist(), self._sequences[1:].tolist(), strict=True):
            pieces = [
                self._tokens[start : start + length]
                for start, length in zip(
                    self._starts[first:stop].tolist(), self._lengths[first:stop].tolist(), strict=True
                )
            ]
            yield np.concatenate(pieces) if pieces else self._tokens[:0]


def open_megatron(prefix: Path) -> MegatronDataset:
    """Open ``PREFIX.bin`` and ``PREFIX.idx``."""
    content, index = (prefix.with_name(prefix.name + ending) for ending in (".bin", ".idx"))
    try:
        size, content_size = index.stat().st_size, content.stat().st_size
        with index.open("rb") as stream:
            header = stream.read(_HEADER.size)
            if len(header) < _HEADER.size or not header.startswith(_MAGIC):
                raise _format_error(
                    index, "not an index of Megatron; Megatron's own tools can convert its older format"
                )
            _, version, code, num_sequences, num_edges = _HEADER.unpack(header)
            if version != 1 or code not in _DTYPES:
                raise _format_error(index, f"is of version {version} with type {code}, expected 1 with integers")
            # the counts are a claim: the file's size says whether they can be true before anything is read
            expected = _HEADER.size + 12 * num_sequences + 8 * num_edges
            # behind them may be a byte a sequence, its mode, which text has no use for
            if size not in (expected, expected + num_sequences):
                raise _format_error(
                    index, f"has {size} bytes, {num_sequences} sequences and {num_edges} edges need {expected}"
                )
            lengths = np.frombuffer(stream.read(4 * num_sequences), "<i4").astype(np.int64)
            pointers = np.frombuffer(stream.read(8 * num_sequences), "<i8")
            edges = np.frombuffer(stream.read(8 * num_edges), "<i8")
        stored = np.dtype(_DTYPES[code])
        _check_index(index, (lengths, pointers, edges), stored.itemsize, content_size)
        tokens: NDArray[Any] = np.memmap(content, stored, "r") if content_size else np.empty(0, stored)
    except OSError as exc:
        raise DataError(f"{prefix}: cannot be read ({exc.strerror}); give the common prefix of .bin and .idx") from exc
    starts = pointers // stored.itemsize
    return MegatronDataset(prefix, len(edges) - 1, edges.astype(np.int64), starts, lengths, np.asarray(tokens))


def _check_index(index: Path, tables: tuple[NDArray[np.int64], ...], itemsize: int, content_size: int) -> None:
    lengths, pointers, edges = tables
    ends_beyond = pointers > content_size - lengths * itemsize
    if (lengths < 0).any() or (pointers < 0).any() or (pointers % itemsize).any() or ends_beyond.any():
        raise _format_error(index, f"names sequences outside of the {content_size} bytes of tokens")
    is_complete = len(edges) >= 1 and edges[0] == 0 and edges[-1] == len(lengths) and (edges[1:] >= edges[:-1]).all()
    if not is_complete:
        raise _format_error(index, "has documents that do not cover its sequences")
    if content_size % itemsize:
        raise _format_error(index, f"has items of {itemsize} bytes, but the tokens have {content_size}")


def _format_error(path: Path, what: str) -> DataError:
    return DataError(f"{path}: {what}; write it again, or get the files from their source again")
