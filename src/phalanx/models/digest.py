"""One SHA-256 over all weights, whatever stages they were trained in."""

import hashlib
import sys
from collections.abc import Iterable

import torch
from torch import Tensor

from phalanx.config import canonical_json
from phalanx.errors import ModelError

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def weights_digest(named_tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return the SHA-256, in hex, over tensors sorted by name.

    Each tensor enters as the canonical JSON of its name, dtype, shape and size in bytes, a newline, then
    its values in row-major order, little-endian. Order, strides, device and the layout of stages
    do not matter; every bit of every value does.

    Raises:
        ModelError: A name occurs twice (a tied weight must be given once), or a dtype has no plain bytes.
    """
    tensors: dict[str, Tensor] = {}
    for name, tensor in named_tensors:
        if name in tensors:
            raise ModelError(f"weights digest: {name!r} is given twice; give every tensor once")
        tensors[name] = tensor
    total = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        header = [name, str(tensor.dtype), list(tensor.shape), tensor.numel() * tensor.element_size()]
        total.update(canonical_json(header) + b"\n")
        total.update(_little_endian(name, tensor))
    return total.hexdigest()


def _little_endian(name: str, tensor: Tensor) -> memoryview:
    word = _WORDS.get(tensor.element_size())
    if word is None or tensor.layout is not torch.strided or tensor.is_quantized:
        raise ModelError(f"weights digest: {name!r} has dtype {tensor.dtype}; expected plain numbers of 1 to 8 bytes")
    array = tensor.cpu().contiguous().reshape(-1).view(word).numpy()
    return (array if sys.byteorder == "little" else array.byteswap()).data
