"""A stage's tensors as the bytes of a safetensors file, piece by piece: no second copy of the stage is made."""

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.errors import CheckpointError
from phalanx.transport.tensors import tensor_buffers


@dataclass(frozen=True, eq=False)
class Shard:
    """The tensors of one stage.

    Attributes:
        stage: Index of the stage, from 0.
        tensors: Tensors by name: ``weight/<parameter>`` and the optimizer's state of the same parameter, such as
            ``exp_avg/<parameter>`` and ``exp_avg_sq/<parameter>``; any shape and dtype.
        num_steps: Optimizer steps that the state has taken.
    """

    stage: int
    tensors: dict[str, Tensor]
    num_steps: int


_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
}
_ALIGNMENT = 8


def safetensors_pieces(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """Yield a safetensors file: its header, then each tensor in place where it is dense and on the CPU.

    Tensors may share memory; each is written by itself. Wide types come first, so that each is aligned.

    Source: the safetensors format, https://github.com/huggingface/safetensors (little-endian header length, JSON
    header padded with spaces, tensors without holes).
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, dict[str, object]] = {}
    offset = 0
    for name in names:
        tensor = tensors[name]
        if tensor.dtype not in _NAMES:
            raise CheckpointError(
                f"checkpoint: {name!r:.200} is of {tensor.dtype}; expected one of {sorted(_NAMES.values())}"
            )
        stop = offset + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    yield struct.pack("<Q", len(text)) + text
    for name in names:
        yield tensor_buffers(tensors[name].detach().cpu().contiguous())
