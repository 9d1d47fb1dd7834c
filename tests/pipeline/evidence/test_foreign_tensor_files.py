"""Tensor files of evidence that somebody hands over: what torch does not have is refused, and ends no program."""

import hashlib
import json
import struct

import pytest

from phalanx.errors import EvidenceError
from phalanx.pipeline.evidence.files import TensorFile, read_tensors


@pytest.mark.parametrize(
    ("dtype", "shape", "size"), [("F32", [0, 2**63], 0), ("F32", [2**63, 0], 0), ("F6_E2M3", [4], 3)]
)
def test_a_tensor_that_torch_does_not_have_is_refused(tmp_path, dtype, shape, size):
    header = json.dumps({"claimed": {"dtype": dtype, "shape": shape, "data_offsets": [0, size]}}).encode()
    header += b" " * (-len(header) % 8)
    content = struct.pack("<Q", len(header)) + header + bytes(size)
    (tmp_path / "step-0.safetensors").write_bytes(content)
    file = TensorFile(file="step-0.safetensors", sha256=hashlib.sha256(content).hexdigest())

    with pytest.raises(EvidenceError, match="not a safetensors file"):
        read_tensors(tmp_path, file)
