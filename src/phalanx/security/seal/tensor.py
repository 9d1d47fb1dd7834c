"""The kind of tensor that a frame carries: the receiver decides it, and never takes it from the peer."""

import math
import re
import struct
from dataclasses import dataclass, field
from typing import Self

from phalanx.errors import SealError
from phalanx.security.seal.context import Purpose
from phalanx.security.seal.header import SealRefusal

ITEM_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
}
"""Element types by name, with the bytes of one; the order is part of the wire format."""
MAX_DIMS = 8
MAX_TENSOR_BYTES = 2**40
_DTYPES = tuple(ITEM_BYTES)
_NAME = re.compile(r"[!-~]{1,200}")
_PREFIX = struct.Struct(">BBBB")


@dataclass(frozen=True)
class TensorKind:
    """One kind of tensor that crosses, the same in each step; built once and used for every frame.

    Attributes:
        name: Such as ``cut`` or ``layers.5.lora_a``; 1 to 200 plain ASCII characters.
        dtype: A key of `ITEM_BYTES`.
        shape: Sizes; empty for a scalar.
    """

    purpose: Purpose
    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int = field(init=False)
    encoded: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.purpose, Purpose) or self.dtype not in ITEM_BYTES:
            raise SealError(
                SealRefusal.MALFORMED, f"tensor {self.name[:40]!r}: unknown purpose or dtype {self.dtype[:40]}"
            )
        if _NAME.fullmatch(self.name) is None:
            raise SealError(
                SealRefusal.MALFORMED, "tensor: its name is not 1 to 200 plain ASCII characters without blanks"
            )
        if len(self.shape) > MAX_DIMS or any(type(n) is not int or not 0 <= n < MAX_TENSOR_BYTES for n in self.shape):
            raise SealError(SealRefusal.MALFORMED, f"tensor {self.name}: shape {self.shape!r:.80} is no shape")
        size_bytes = math.prod(self.shape) * ITEM_BYTES[self.dtype]
        if size_bytes > MAX_TENSOR_BYTES:
            raise SealError(
                SealRefusal.MALFORMED, f"tensor {self.name}: {size_bytes} bytes, at most {MAX_TENSOR_BYTES}"
            )
        name = self.name.encode("ascii")
        prefix = _PREFIX.pack(self.purpose, _DTYPES.index(self.dtype), len(self.shape), len(name))
        shape = struct.pack(f">{len(self.shape)}Q", *self.shape)
        object.__setattr__(self, "size_bytes", size_bytes)
        object.__setattr__(self, "encoded", prefix + name + shape)

    @classmethod
    def from_bytes(cls, encoded: bytes) -> Self:
        """Read what `encoded` says."""
        try:
            purpose, dtype, num_dims, name_size = _PREFIX.unpack_from(encoded)
            shape = struct.unpack(f">{num_dims}Q", encoded[_PREFIX.size + name_size :])
            name = encoded[_PREFIX.size : _PREFIX.size + name_size].decode("ascii")
            return cls(Purpose(purpose), name, _DTYPES[dtype], shape)
        except (struct.error, ValueError, IndexError) as exc:
            raise SealError(SealRefusal.MALFORMED, "frame: its description of the tensor is malformed") from exc

    def __str__(self) -> str:
        return f"{self.purpose.name.lower()} {self.name} {self.dtype}{list(self.shape)}"
