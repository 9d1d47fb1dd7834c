"""A test's own NVIDIA: a device's chain and SPDM reports."""

import struct
from dataclasses import dataclass, field

from authority import NOW, Form, integer, issue, oid, p384, tlv
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from published import Case

from phalanx.security.tee import Binding, Evidence, Policy
from phalanx.security.tee.nvidia.gpu import NvGpuReference

FWID = b"\x5f" * 48
BLOCKS = {index: bytes([index]) * 48 for index in range(1, 6)}


@dataclass
class Nvidia:
    """A root, a model's authority and one GPU."""

    fwid: bytes = FWID
    newer: bool = False
    leaf_form: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.root = issue("NVIDIA Device Identity CA", p384())
        self.model = issue("NVIDIA GB100 Identity", p384(), self.root, Form(is_authority=True))
        dice = ("2.23.133.5.4.1.1", self._tcb_info()) if self.newer else ("2.23.133.5.4.1", self._composite())
        self.leaf = issue("GB100 A01 GSP FMC LF", p384(), self.model, Form(extensions=(dice,), **self.leaf_form))

    def _composite(self) -> bytes:
        spki = tlv(0x30, tlv(0x30, oid("1.2.840.10045.2.1")), tlv(0x03, bytes(98)))
        return tlv(0x30, integer(1), spki, _digest(self.fwid))

    def _tcb_info(self) -> bytes:
        fwids = tlv(0xA6, _digest(self.fwid), _digest(bytes(48)))
        return tlv(0x30, tlv(0x80, b"NVIDIA"), tlv(0x83, b"\x02"), fwids, tlv(0x87, bytes(5)))

    def report(
        self, nonce: bytes, *, blocks: dict[int, bytes] | None = None, version: int = 0x11, fwid: bytes = FWID
    ) -> bytes:
        chosen = BLOCKS if blocks is None else blocks
        record = b"".join(
            struct.pack("<BBHBH", index, 1, len(value) + 3, 0, len(value)) + value for index, value in chosen.items()
        )
        fields = {3: b"575.01.02\0", 6: bytes.fromhex("009f009601000000"), 20: fwid}
        opaque = b"".join(struct.pack("<HH", kind, len(value)) + value for kind, value in fields.items())
        request = bytes([version, 0xE0, 1, 0xFF]) + nonce + b"\0"
        response = bytes([version, 0x60, 0, 0, len(chosen)]) + len(record).to_bytes(3, "little") + record
        body = request + response + bytes(32) + struct.pack("<H", len(opaque)) + opaque
        r, s = decode_dss_signature(self.leaf.key.sign(body, ec.ECDSA(hashes.SHA384())))
        return body + r.to_bytes(48, "big") + s.to_bytes(48, "big")

    def case(self, binding: Binding, **changes) -> Case:
        chain = self.leaf.pem + self.model.pem + self.root.pem
        evidence = Evidence("nv-gpu", self.report(binding.binding_digest(), **changes), {"chain": chain}, binding)
        reference = NvGpuReference(
            measurements={"2": (BLOCKS[2].hex(),)}, driver_versions=("575.01.02",), vbios_versions=("96.00.9F.00.01",)
        )
        return Case(evidence, Policy({"nv-gpu": reference}, {"nv-gpu": (self.root.parsed,)}), binding, NOW)


def _digest(value: bytes) -> bytes:
    """A hash's name and a digest, as DICE writes them."""
    return tlv(0x30, oid("2.16.840.1.101.3.4.2.2"), tlv(0x04, value))
