"""A test's own TPM: keys with public areas, quotes and PCRs; no device and no simulator of one."""

import hashlib
import struct
from dataclasses import dataclass

from authority import NOW, Form, issue, p256, rsa_key
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from published import Case

from phalanx.config import canonical_json
from phalanx.security.tee import Binding, Evidence, Policy
from phalanx.security.tee.tpm.key import TpmReference

AK_ATTRIBUTES = 0x00050072
PCRS = {0: b"\x01" * 32, 7: b"\x07" * 32}


def tpm2b(data: bytes) -> bytes:
    return struct.pack(">H", len(data)) + data


@dataclass
class Tpm:
    """One TPM with an attestation key."""

    kind: str = "ecc"
    attributes: int = AK_ATTRIBUTES

    def __post_init__(self) -> None:
        self.root = issue("Test TPM Manufacturer CA", p256())
        self.ak = rsa_key("ak") if self.kind == "rsa" else p256()
        self.ek = issue("", rsa_key("ek"), self.root, Form())
        self.ak_certificate = issue("AK", self.ak, self.root, Form())

    def public(self) -> bytes:
        numbers = self.ak.public_key().public_numbers()
        if isinstance(self.ak, rsa.RSAPrivateKey):
            head = struct.pack(">HHI", 0x0001, 0x000B, self.attributes) + tpm2b(b"")
            middle = struct.pack(">HHHHI", 0x0010, 0x0014, 0x000B, 2048, 0)
            return head + middle + tpm2b(numbers.n.to_bytes(256, "big"))
        head = struct.pack(">HHI", 0x0023, 0x000B, self.attributes) + tpm2b(b"")
        middle = struct.pack(">HHHHH", 0x0010, 0x0018, 0x000B, 0x0003, 0x0010)
        return head + middle + tpm2b(numbers.x.to_bytes(32, "big")) + tpm2b(numbers.y.to_bytes(32, "big"))

    @property
    def ak_name(self) -> str:
        return "000b" + hashlib.sha256(self.public()).hexdigest()

    def quote(self, extra: bytes, *, pcrs: dict[int, bytes] = PCRS, magic: int = 0xFF544347, kind: int = 0x8018):
        bits = sum(1 << index for index in pcrs).to_bytes(3, "little")
        attest = struct.pack(">IH", magic, kind) + tpm2b(b"\0\x0b" + bytes(32)) + tpm2b(extra)
        attest += struct.pack(">QIIBQ", 1000, 3, 1, 1, 0x2022)
        attest += struct.pack(">IHB", 1, 0x000B, 3) + bits
        attest += tpm2b(hashlib.sha256(b"".join(pcrs[index] for index in sorted(pcrs))).digest())
        return tpm2b(attest) + self.sign(attest)

    def sign(self, attest: bytes) -> bytes:
        if isinstance(self.ak, rsa.RSAPrivateKey):
            signature = self.ak.sign(attest, padding.PKCS1v15(), hashes.SHA256())
            return struct.pack(">HH", 0x0014, 0x000B) + tpm2b(signature)
        r, s = decode_dss_signature(self.ak.sign(attest, ec.ECDSA(hashes.SHA256())))
        return struct.pack(">HH", 0x0018, 0x000B) + tpm2b(r.to_bytes(32, "big")) + tpm2b(s.to_bytes(32, "big"))

    def case(self, binding: Binding, **changes) -> Case:
        """A quote with an enrolled AK and the EK's certificate."""
        evidence = Evidence(
            "tpm",
            self.quote(binding.binding_digest(), **changes),
            {
                "ak": self.public(),
                "pcrs": pcr_values(changes.get("pcrs", PCRS)),
                "ek_certificate": self.ek.der,
                "chain": self.root.pem,
            },
            binding,
        )
        values = {"sha256.0": (PCRS[0].hex(),), "sha256.7": (PCRS[7].hex(),)}
        reference = TpmReference(measurements=values, ak_names=(self.ak_name,))
        return Case(evidence, Policy({"tpm": reference}, {"tpm": (self.root.parsed,)}), binding, NOW)


def pcr_values(pcrs: dict[int, bytes]) -> bytes:
    return canonical_json({"sha256": {str(index): value.hex() for index, value in pcrs.items()}})
