"""The messages between the trusted side and a worker, as bodies and payloads of signed frames.

| kind | from | payload |
|---|---|---|
| `mask.load` | trusted side | some rows of a quantised matrix, int16 |
| `mask.multiply` | trusted side | masked numbers, uint32 |
| `mask.product` | worker | their product, uint32 |
| `mask.refused` | worker | none; why it has no answer |
| `mask.end` | trusted side | none |

Numbers are little-endian, and row after row.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from phalanx.config import StrictModel, printable_text
from phalanx.errors import FrameError
from phalanx.security.mask import MaskedMessage, ProductMessage
from phalanx.security.mask.message import Direction
from phalanx.security.mask.pads import MAX_ELEMENTS
from phalanx.transport import Endpoint, TransportConfig

LOAD, MULTIPLY, PRODUCT, REFUSED, END = "mask.load", "mask.multiply", "mask.product", "mask.refused", "mask.end"

HEADER_BYTES = 4096
"""Of a frame, at most."""
_MAX_ROWS = 2**24
_RECEIPTS_KEPT = 64


class ProductReference(StrictModel):
    """The product that a message is about."""

    layer: str = Field(min_length=1, max_length=512)
    direction: Direction

    @property
    def product_message(self) -> ProductMessage:
        """The product."""
        return ProductMessage(self.layer, self.direction)


class Load(ProductReference):
    """Rows of a matrix, from `first` on; the last ones complete it."""

    inner: int = Field(ge=1, le=2**22)
    columns: int = Field(ge=1, le=2**22)
    first: int = Field(ge=0)
    rows: int = Field(ge=1)


class Numbers(ProductReference):
    """Masked numbers, or their product under the number of the request."""

    number: int = Field(ge=0)
    rows: int = Field(ge=1, le=_MAX_ROWS)
    columns: int = Field(ge=1, le=2**22)


class Refusal(StrictModel):
    """The reason why a worker has no answer."""

    reason: str = Field(max_length=1000)


def numbers_of_frame(limits: TransportConfig) -> int:
    """Return how many numbers one request or one answer may have."""
    return min(MAX_ELEMENTS, (limits.max_frame_bytes - HEADER_BYTES) // 4)


def load_parts(
    product: ProductMessage, values: NDArray[np.int32], max_bytes: int
) -> list[tuple[dict[str, Any], memoryview]]:
    """Cut a quantised matrix into bodies and payloads of at most so many bytes each."""
    inner, columns = values.shape
    if np.abs(values).max(initial=0) >= 2**15:
        raise FrameError(f"{product}: a weight needs more than 16 bits, expected at most 2^15 - 1 in absolute value")
    step = max_bytes // (2 * columns)
    if not step:
        raise FrameError(f"{product}: a row takes {2 * columns} bytes, frames have {max_bytes}; raise max_frame_bytes")
    parts = []
    for first in range(0, inner, step):
        rows = np.ascontiguousarray(values[first : first + step], dtype="<i2")
        load = Load(
            layer=product.layer,
            direction=product.direction,
            inner=inner,
            columns=columns,
            first=first,
            rows=len(rows),
        )
        parts.append((load.model_dump(), _bytes_of(rows)))
    return parts


def read_load(body: dict[str, Any], payload: memoryview) -> tuple[Load, NDArray[np.int32]]:
    """Read rows of a matrix."""
    load = _parse_body(Load, body)
    if load.first + load.rows > load.inner:
        raise FrameError(f"{load.product_message}: rows {load.first} to {load.first + load.rows} of {load.inner} came")
    return load, _view_numbers(payload, "<i2", load.rows, load.columns, load.product_message).astype(np.int32)


def write_masked(masked: MaskedMessage) -> tuple[dict[str, Any], memoryview]:
    """Return body and payload of masked numbers, or of their product."""
    rows, columns = masked.values.shape
    product = masked.product
    numbers = Numbers(
        layer=product.layer, direction=product.direction, number=masked.number, rows=rows, columns=columns
    )
    return numbers.model_dump(), _bytes_of(np.ascontiguousarray(masked.values, dtype="<u4"))


def read_masked(body: dict[str, Any], payload: memoryview) -> MaskedMessage:
    """Read masked numbers or their product; whether they are elements of Z_p is checked before any computation."""
    numbers = _parse_body(Numbers, body)
    values = _view_numbers(payload, "<u4", numbers.rows, numbers.columns, numbers.product_message)
    return MaskedMessage(numbers.product_message, numbers.number, values.astype(np.uint32))


def read_refusal(body: dict[str, Any]) -> str:
    """Return a worker's reason, harmless to a terminal or a log."""
    return printable_text(_parse_body(Refusal, body).reason)


_Body = TypeVar("_Body", bound=StrictModel)


def send_unreceipted(
    endpoint: Endpoint, receiver: str, kind: str, body: dict[str, Any], payload: Sequence[memoryview] = ()
) -> None:
    """Send a frame and forget old receipts: masked products are disputed by their check, not by signatures."""
    header = endpoint.send_frame(receiver, kind, body, payload)
    endpoint.receipts.forget_before(receiver, header.fields.sequence - _RECEIPTS_KEPT)


def _parse_body(kind: type[_Body], body: dict[str, Any]) -> _Body:
    try:
        return kind.model_validate(body)
    except ValidationError as exc:
        raise FrameError(
            f"masked offload: malformed {kind.__name__.lower()}; run the same release on both sides"
        ) from exc


def _view_numbers(payload: memoryview, kind: str, rows: int, columns: int, product: ProductMessage) -> NDArray[Any]:
    expected = rows * columns * np.dtype(kind).itemsize
    if payload.nbytes != expected:
        raise FrameError(f"{product}: got {payload.nbytes} bytes, expected {expected} for {rows} x {columns} numbers")
    return np.frombuffer(payload, kind).reshape(rows, columns)


def _bytes_of(values: NDArray[Any]) -> memoryview:
    # numpy's stubs declare the buffer protocol only from Python 3.12 on
    return memoryview(values).cast("B")  # type: ignore[arg-type]
