"""Tensors as raw little-endian bytes; their expected form is always the receiver's word."""

import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
from safetensors import SafetensorError

from phalanx.errors import FrameError

UNREADABLE = (SafetensorError, ValueError, KeyError, TypeError, RuntimeError)
"""Errors of readers of safetensors on bytes of others: types and sizes that torch lacks raise none of safetensors."""
_NAMES = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.int64: "int64",
    torch.int32: "int32",
    torch.int16: "int16",
    torch.int8: "int8",
    torch.uint8: "uint8",
}


def tensor_buffers(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor in place, without a copy, bfloat16 included.

    Args:
        tensor: Dense, contiguous, on the CPU. It must not change until `Endpoint.send_frame` has returned.

    Raises:
        FrameError: It lies elsewhere or in strides, or its dtype does not cross between parties.
    """
    return tensor_memory(tensor).toreadonly()


def tensor_memory(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor in place, to be written to; as `tensor_buffers` otherwise."""
    _dtype_name(tensor.dtype)
    _check_byte_order()
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or not tensor.is_contiguous():
        raise FrameError(
            f"tensor: is {tensor.layout} on {tensor.device}, expected a contiguous one on the CPU; "
            "call .contiguous().cpu() first"
        )
    raw = tensor.detach() if tensor.requires_grad else tensor
    if raw.dtype is torch.bfloat16 or not raw.shape or not raw.numel():
        # numpy knows no bfloat16, and no cast of a scalar or of nothing
        raw = raw.reshape(-1).view(torch.uint8)
    return _bytes_of(raw)


def tensor_from(
    buffer: bytes | memoryview,
    dtype: torch.dtype,
    shape: Sequence[int],
    claim: dict[str, Any] | None = None,
) -> torch.Tensor:
    """Return the tensor that a payload holds, in memory of its own.

    The one copy (0.1 ms a MiB) gives the alignment of torch's allocator. A view into the frame would start at
    any byte, and BLAS libraries promise equal bits only for equally aligned data: two honest ones may differ.

    Args:
        claim: The sender's description in its body, if it has one.

    Raises:
        FrameError: Size or claim differ from the expectation. Values are not looked at: NaN passes.
    """
    _check_byte_order()
    expected = {"dtype": _dtype_name(dtype), "shape": list(shape)}
    if claim is not None and claim != expected:
        raise FrameError(f"tensor: the sender claims {_shorten_claim(claim)}, expected {_shorten_claim(expected)}")
    size_bytes = math.prod(shape) * dtype.itemsize
    received = memoryview(buffer)
    if received.nbytes != size_bytes:
        raise FrameError(f"tensor: found {received.nbytes} bytes, expected {size_bytes} for {_shorten_claim(expected)}")
    tensor = torch.empty(tuple(shape), dtype=dtype)
    if size_bytes:
        tensor_memory(tensor)[:] = received.cast("B")
    return tensor


def _bytes_of(raw: torch.Tensor) -> memoryview:
    # numpy's stubs declare the buffer protocol only from Python 3.12 on
    view = memoryview(raw.numpy())  # type: ignore[arg-type]
    return view if view.nbytes == 0 else view.cast("B")


def _dtype_name(dtype: torch.dtype) -> str:
    if dtype not in _NAMES:
        raise FrameError(f"tensor: {dtype} does not cross between parties; choices: {', '.join(_NAMES.values())}")
    return _NAMES[dtype]


def _shorten_claim(claim: dict[str, Any]) -> str:
    text = f"{claim.get('dtype')!r:.40} {claim.get('shape')!r:.80}"
    return text if len(claim) == 2 else f"{text} and other keys"


def _check_byte_order() -> None:
    if sys.byteorder != "little":
        raise FrameError("tensor: this machine is big-endian, and the wire is little-endian")
