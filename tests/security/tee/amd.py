"""A test's own AMD: ARK, ASK or ASVK, VCEK or VLEK, and reports of every generation."""

import struct
from dataclasses import dataclass, field

from authority import NOW, Form, Holder, integer, issue, p384, rsa_key, tlv
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from published import Case

from phalanx.security.tee import Binding, Evidence, Policy
from phalanx.security.tee.amd.snp import SnpReference

_AMD = "1.3.6.1.4.1.3704.1"
CPU = {"Milan": (0x19, 0x01), "Genoa": (0x19, 0x11), "Turin": (0x1A, 0x02)}
TCB = {"bootloader": 4, "tee": 1, "snp": 22, "microcode": 213, "fmc": 2}
_OIDS = {"bootloader": "3.1", "tee": "3.2", "snp": "3.3", "microcode": "3.8", "fmc": "3.9"}
GOOD_POLICY = 0x30000


def raw_tcb(product: str, tcb: dict[str, int]) -> bytes:
    if product == "Turin":
        return bytes([tcb["fmc"], tcb["bootloader"], tcb["tee"], tcb["snp"], 0, 0, 0, tcb["microcode"]])
    return bytes([tcb["bootloader"], tcb["tee"], 0, 0, 0, 0, tcb["snp"], tcb["microcode"]])


@dataclass
class Report:
    """What a report says; each field can be set before it is signed."""

    product: str = "Milan"
    version: int = 3
    policy: int = GOOD_POLICY
    vmpl: int = 0
    signing_key: int = 0
    tcb: dict[str, int] = field(default_factory=lambda: dict(TCB))
    report_data: bytes = bytes(64)
    launch: bytes = bytes(range(48))
    chip_id: bytes = b"\x5a" * 64
    family_model: tuple[int, int] | None = None

    def body(self) -> bytes:
        family, model = self.family_model or CPU[self.product]
        raw = raw_tcb(self.product, self.tcb)
        out = bytearray(0x2A0)
        struct.pack_into("<II", out, 0, self.version, 0)
        struct.pack_into("<Q", out, 8, self.policy)
        struct.pack_into("<II", out, 0x30, self.vmpl, 1)
        out[0x38:0x40] = raw
        struct.pack_into("<I", out, 0x48, self.signing_key << 2)
        out[0x50:0x90] = self.report_data
        out[0x90:0xC0] = self.launch
        out[0x180:0x188] = raw
        if self.version > 2:
            out[0x188:0x18A] = bytes([family, model])
        out[0x1A0:0x1E0] = self.chip_id
        out[0x1E0:0x1E8] = raw
        return bytes(out)

    def signed_by(self, key: ec.EllipticCurvePrivateKey) -> bytes:
        body = self.body()
        r, s = decode_dss_signature(key.sign(body, ec.ECDSA(hashes.SHA384())))
        return body + r.to_bytes(72, "little") + s.to_bytes(72, "little") + bytes(368)


@dataclass
class Amd:
    """One generation's chain down to a leaf."""

    product: str = "Milan"
    vlek: bool = False
    certified_tcb: dict[str, int] = field(default_factory=lambda: dict(TCB))
    chip_id: bytes = b"\x5a" * 64
    cloud: str = "Example Cloud"
    named: str = ""
    leaf_form: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        intermediate = f"SEV-VLEK-{self.product}" if self.vlek else f"SEV-{self.product}"
        self.ark = issue(f"ARK-{self.product}", rsa_key("ark"))
        self.ask = issue(intermediate, rsa_key("ask"), self.ark, Form(is_authority=True, path_length=0))
        subject = "SEV-VLEK" if self.vlek else "SEV-VCEK"
        self.leaf: Holder = issue(subject, p384(), self.ask, Form(extensions=self.extensions(), **self.leaf_form))

    def extensions(self) -> tuple[tuple[str, bytes], ...]:
        """What AMD writes into the leaf: product, versions, chip or cloud."""
        product = (self.named or self.product) + ("" if self.vlek else "-B1")
        found = [(f"{_AMD}.1", integer(1)), (f"{_AMD}.2", tlv(0x16, product.encode()))]
        names = [one for one in _OIDS if one != "fmc" or self.product == "Turin"]
        found += [(f"{_AMD}.{_OIDS[one]}", integer(self.certified_tcb[one])) for one in names]
        chip = self.chip_id[:8] if self.product == "Turin" else self.chip_id
        found.append((f"{_AMD}.5", tlv(0x16, self.cloud.encode())) if self.vlek else (f"{_AMD}.4", chip))
        return tuple(found)

    @property
    def chain(self) -> bytes:
        return self.ask.pem + self.ark.pem

    def case(self, binding: Binding, report: Report | None = None, **reference) -> Case:
        """Evidence of a report (an ordinary one by default) and the policy that it must pass."""
        report = report or self.report(binding)
        evidence = Evidence(
            "snp",
            report.signed_by(self.leaf.key),
            {"vlek" if self.vlek else "vcek": self.leaf.der, "chain": self.chain},
            binding,
        )
        floor = {one: value for one, value in TCB.items() if one != "fmc" or self.product == "Turin"}
        values = SnpReference.model_validate(
            {"measurements": {"launch": (report.launch.hex(),)}, "min_tcb": floor, **reference}
        )
        return Case(evidence, Policy({"snp": values}, {"snp": (self.ark.parsed,)}), binding, NOW)

    def report(self, binding: Binding, **changes) -> Report:
        """An ordinary report of this chip."""
        settings = {
            "product": self.product,
            "signing_key": int(self.vlek),
            "report_data": binding.binding_digest().ljust(64, b"\0"),
            "chip_id": self.chip_id[:8].ljust(64, b"\0") if self.product == "Turin" else self.chip_id,
            **changes,
        }
        return Report(**settings)
