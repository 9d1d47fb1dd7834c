"""Datasets as Parquet: a row a document, its tokens a list, so that Hugging Face datasets and others read them."""

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.config import canonical_json
from phalanx.data.shards.dataset import Dataset
from phalanx.data.shards.records import Fields, is_plain
from phalanx.errors import DataError
from phalanx.security.crypto import parse_canonical

_ROWS = 512
"""Of one group: few enough for little memory, enough for columns to be worth it."""
_MAX_TOKENS = 2**22


@dataclass(frozen=True)
class TokenRow:
    """One document as a Parquet file has it.

    Attributes:
        name: Name of the document; None where there is no such column.
        digest: Digest of its text, in hex; None where there is no such column.
    """

    ids: NDArray[Any]
    name: str | None
    digest: str | None
    fields: Fields


def write_parquet(dataset: Dataset, group: str, split: str, path: Path) -> Path:
    """Write one split of a group: columns ``tokens``, ``name``, ``digest``, ``source`` and ``fields`` (JSON)."""
    pa, pq = _import_arrow("pyarrow"), _import_arrow("pyarrow.parquet")
    starts, tokens = dataset.document_starts(group, split), dataset.tokens(group, split)
    sources = [source.name for source in dataset.manifest.sources]
    number = pa.uint16() if tokens.dtype.itemsize == 2 else pa.uint32()
    text = pa.string()
    schema = pa.schema(
        [("tokens", pa.list_(number)), ("name", text), ("digest", text), ("source", text), ("fields", text)]
    )
    entries = dataset.document_entries(group, split)
    try:
        with path.open("xb") as stream, pq.ParquetWriter(stream, schema, compression="zstd") as writer:
            for first, stop in _cut_blocks(starts):
                lists = pa.ListArray.from_arrays(
                    pa.array((starts[first : stop + 1] - starts[first]).astype(np.int32)),
                    pa.array(tokens[int(starts[first]) : int(starts[stop])]),
                )
                rows = [next(entries) for _ in range(first, stop)]
                columns = [
                    lists,
                    pa.array([row.name for row in rows], text),
                    pa.array([row.digest for row in rows], text),
                    pa.array([sources[row.source] for row in rows], text),
                    pa.array([canonical_json(dict(row.fields)).decode() for row in rows], text),
                ]
                writer.write_table(pa.Table.from_arrays(columns, schema=schema))
    except OSError as exc:
        raise DataError(f"{path}: cannot be written ({exc.strerror or exc}); give another path") from exc
    return path


def read_parquet(path: Path, column: str = "tokens") -> Iterator[TokenRow]:
    """Yield every document of a Parquet file with lists of tokens; columns of `write_parquet` are taken over."""
    pa, pq = _import_arrow("pyarrow"), _import_arrow("pyarrow.parquet")
    try:
        with pq.ParquetFile(path) as file:
            schema = file.schema_arrow
            if column not in schema.names or not _is_integers(pa, schema.field(column).type):
                raise DataError(
                    f'{path}: has no column "{column}" with lists of integers, only {schema.names!s:.300}; call the '
                    'column of the tokens "tokens"'
                )
            columns = [column, *(name for name in ("name", "digest", "fields") if name in schema.names)]
            for batch in file.iter_batches(_ROWS, columns=columns):
                yield from _batch_rows(batch, column, str(path))
    except (OSError, ValueError, pa.ArrowException) as exc:
        raise DataError(f"{path}: cannot be read as Parquet ({exc!s:.200}); write it again") from exc


def _batch_rows(batch: Any, column: str, where: str) -> Iterator[TokenRow]:
    lists = batch.column(column)
    others = {name: batch.column(name).to_pylist() for name in batch.schema.names if name != column}
    for number in range(batch.num_rows):
        token_list = lists[number]
        if not token_list.is_valid or token_list.values.null_count:
            raise DataError(f"{where}: a row has no tokens, or an empty one among them; write the file again")
        ids = token_list.values.to_numpy(zero_copy_only=False)
        name, digest, fields = (others[key][number] if key in others else None for key in ("name", "digest", "fields"))
        if not all(isinstance(text, str | None) for text in (name, digest, fields)):
            raise DataError(
                f"{where}: name, digest and fields must be columns of text; rename other columns with these names"
            )
        yield TokenRow(ids, name, digest, {} if fields is None else _parse_fields(fields, where))


def _parse_fields(content: str, where: str) -> Fields:
    try:
        fields = parse_canonical(content.encode())
    except ValueError as exc:
        raise DataError(f"{where}: fields are not canonical JSON: {exc}; write the file again") from exc
    if not all(is_plain(value) for value in fields.values()):
        raise DataError(f"{where}: fields have values other than text and numbers; write the file again")
    return fields


def _cut_blocks(starts: NDArray[np.uint64]) -> Iterator[tuple[int, int]]:
    """Cut documents into groups of rows that fit into memory."""
    first = 0
    while first < len(starts) - 1:
        last = int(np.searchsorted(starts, starts[first] + np.uint64(_MAX_TOKENS), side="right")) - 1
        stop = min(len(starts) - 1, first + _ROWS, max(first + 1, last))
        if int(starts[stop] - starts[first]) >= 2**31:
            raise DataError(f"document {first} has 2^31 tokens or more, above the limit of a Parquet list")
        yield first, stop
        first = stop


def _is_integers(pa: Any, kind: Any) -> bool:
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return bool(is_list and pa.types.is_integer(kind.value_type))


def _import_arrow(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as exc:
        raise DataError("Parquet needs pyarrow: pip install phalanx-train[data]") from exc
