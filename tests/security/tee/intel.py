"""A test's own Intel: root, platform CA, PCK, TCB signer, collateral, and quotes of every version."""

import hashlib
import json
import struct
from dataclasses import dataclass, field, replace

from authority import NOW, Form, Holder, integer, issue, oid, p256, tlv
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from published import Case

from phalanx.security.tee import Binding, Evidence, Policy
from phalanx.security.tee.intel.sgx import SgxReference
from phalanx.security.tee.intel.tdx import TdxReference

_SGX = "1.2.840.113741.1.13.1"
FMSPC = bytes.fromhex("00906ed50000")
_QE_SIGNER = b"\xdc" * 32
SINCE, UNTIL = "2026-05-20T00:00:00Z", "2026-06-20T00:00:00Z"


def raw_signature(key: ec.EllipticCurvePrivateKey, data: bytes) -> bytes:
    r, s = decode_dss_signature(key.sign(data, ec.ECDSA(hashes.SHA256())))
    return r.to_bytes(32, "big") + s.to_bytes(32, "big")


def sgx_body(
    report_data: bytes, *, attributes: int = 0x05, signer: bytes = b"\x77" * 32, product: int = 1, svn: int = 5
) -> bytes:
    out = bytearray(384)
    struct.pack_into("<Q", out, 48, attributes)
    out[64:96], out[128:160] = b"\x11" * 32, signer
    struct.pack_into("<HH", out, 256, product, svn)
    out[320:384] = report_data.ljust(64, b"\0")
    return bytes(out)


def tdx_body(
    report_data: bytes, *, version_15: bool = False, tcb_svn: bytes = b"\x05\x01\x02".ljust(16, b"\0"), **bits
) -> bytes:
    out = bytearray(584)
    out[0:16] = tcb_svn
    out[16:64] = b"\x22" * 48
    struct.pack_into("<Q", out, 120, bits.get("attributes", 0x10000000))
    out[136:184] = b"\x33" * 48
    for index in range(4):
        start = 328 + 48 * index
        out[start : start + 48] = bytes([0x40 + index]) * 48
    out[520:584] = report_data.ljust(64, b"\0")
    return bytes(out) + (tcb_svn + bits.get("service_td", bytes(48)) if version_15 else b"")


@dataclass
class Tables:
    """Intel's two tables, to be changed before they are signed."""

    tee: str = "TDX"
    svns: tuple[int, ...] = (2,) * 16
    pce_svn: int = 11
    tdx_svns: tuple[int, ...] = (5, 0, 2) + (0,) * 13
    status: str = "UpToDate"
    advisories: tuple[str, ...] = ()
    module_status: str = "UpToDate"
    qe_status: str = "UpToDate"
    qe_svn: int = 4
    since: str = SINCE
    until: str = UNTIL
    fmspc: bytes = FMSPC

    def tcb_info(self) -> str:
        tcb = {"sgxtcbcomponents": [{"svn": one} for one in self.svns], "pcesvn": self.pce_svn}
        if self.tee == "TDX":
            tcb["tdxtcbcomponents"] = [{"svn": one} for one in self.tdx_svns]
        level = {"tcb": tcb, "tcbDate": SINCE, "tcbStatus": self.status, "advisoryIDs": list(self.advisories)}
        body = {
            "id": self.tee,
            "version": 3,
            "issueDate": self.since,
            "nextUpdate": self.until,
            "fmspc": self.fmspc.hex().upper(),
            "pceId": "0000",
            "tcbType": 0,
            "tcbEvaluationDataNumber": 17,
            "tcbLevels": [level],
        }
        if self.tee == "TDX":
            module = {"mrsigner": "00" * 48, "attributes": "00" * 8, "attributesMask": "FF" * 8}
            levels = [{"tcb": {"isvsvn": 3}, "tcbDate": SINCE, "tcbStatus": self.module_status}]
            body["tdxModule"] = module
            body["tdxModuleIdentities"] = [{"id": "TDX_01", **module, "tcbLevels": levels}]
        return json.dumps(body, separators=(",", ":"))

    def qe_identity(self) -> str:
        body = {
            "id": "TD_QE" if self.tee == "TDX" else "QE",
            "version": 2,
            "issueDate": self.since,
            "nextUpdate": self.until,
            "tcbEvaluationDataNumber": 17,
            "miscselect": "00000000",
            "miscselectMask": "FFFFFFFF",
            "attributes": "05" + "00" * 15,
            "attributesMask": "FF" * 16,
            "mrsigner": _QE_SIGNER.hex().upper(),
            "isvprodid": 2,
            "tcbLevels": [{"tcb": {"isvsvn": self.qe_svn}, "tcbDate": SINCE, "tcbStatus": self.qe_status}],
        }
        return json.dumps(body, separators=(",", ":"))


@dataclass
class Intel:
    """One platform and the services that vouch for it."""

    svns: tuple[int, ...] = (2,) * 16
    pce_svn: int = 11
    revoked_pck: bool = False
    revoked_ca: bool = False
    qe_attributes: int = 0x05
    qe_signer: bytes = _QE_SIGNER
    key: ec.EllipticCurvePrivateKey = field(default_factory=p256)
    reported_key: ec.EllipticCurvePrivateKey | None = None

    def __post_init__(self) -> None:
        authority = Form(is_authority=True, path_length=0)
        self.root = issue("Intel SGX Root CA", p256())
        self.ca = issue("Intel SGX PCK Platform CA", p256(), self.root, authority)
        self.pck: Holder = issue(
            "Intel SGX PCK Certificate", p256(), self.ca, Form(extensions=((_SGX, self._platform()),))
        )
        self.signer = issue("Intel SGX TCB Signing", p256(), self.root, Form())

    def _platform(self) -> bytes:
        def pair(name: str, value: bytes) -> bytes:
            return tlv(0x30, oid(name), value)

        parts = [pair(f"{_SGX}.2.{index}", integer(svn)) for index, svn in enumerate(self.svns, 1)]
        parts += [pair(f"{_SGX}.2.17", integer(self.pce_svn)), pair(f"{_SGX}.2.18", tlv(4, bytes(self.svns)))]
        return tlv(
            0x30,
            pair(f"{_SGX}.1", tlv(4, bytes(16))),
            pair(f"{_SGX}.2", tlv(0x30, *parts)),
            pair(f"{_SGX}.3", tlv(4, bytes(2))),
            pair(f"{_SGX}.4", tlv(4, FMSPC)),
            pair(f"{_SGX}.5", tlv(0x0A, b"\x01")),
        )

    def collateral(self, tables: Tables) -> dict[str, str]:
        tcb_info, qe_identity = tables.tcb_info(), tables.qe_identity()
        chain = (self.signer.pem + self.root.pem).decode()
        revoked = (self.pck.parsed.serial,) if self.revoked_pck else ()
        revoked_ca = (self.ca.parsed.serial,) if self.revoked_ca else ()
        return {
            "pck_crl_issuer_chain": (self.ca.pem + self.root.pem).decode(),
            "root_ca_crl": self.root.crl(*revoked_ca).hex(),
            "pck_crl": self.ca.crl(*revoked).hex(),
            "tcb_info_issuer_chain": chain,
            "tcb_info": tcb_info,
            "tcb_info_signature": raw_signature(self.signer.key, tcb_info.encode()).hex(),
            "qe_identity_issuer_chain": chain,
            "qe_identity": qe_identity,
            "qe_identity_signature": raw_signature(self.signer.key, qe_identity.encode()).hex(),
        }

    def quote(self, version: int, tee: int, body: bytes) -> bytes:
        """A quote of any version over a body."""
        header = struct.pack("<HHI4x16s20x", version, 2, tee, bytes.fromhex("939a7233f79c4ca9940a0db3957f0607"))
        if version == 5:
            kind = {(0, 384): 1, (0x81, 584): 2, (0x81, 648): 3}[tee, len(body)]
            body = struct.pack("<HI", kind, len(body)) + body
        auth = bytes(range(32))
        bound = hashlib.sha256(_point(self.reported_key or self.key) + auth).digest()
        qe_report = sgx_body(bound, attributes=self.qe_attributes, signer=self.qe_signer, product=2, svn=4)
        chain = self.pck.pem + self.ca.pem + self.root.pem + b"\0"
        certified = qe_report + raw_signature(self.pck.key, qe_report) + struct.pack("<H", len(auth)) + auth
        certified += struct.pack("<HI", 5, len(chain)) + chain
        if version > 3:
            certified = struct.pack("<HI", 6, len(certified)) + certified
        signatures = raw_signature(self.key, header + body) + _point(self.key) + certified
        return header + body + struct.pack("<I", len(signatures)) + signatures

    def case(self, binding: Binding, version: int, body: bytes, tables: Tables | None = None) -> Case:
        """Evidence over a body and the policy that it must pass."""
        tee = 0 if len(body) == 384 else 0x81
        kind = "tdx" if tee else "sgx"
        tables = replace(tables or Tables(), tee=kind.upper())
        collateral = json.dumps(self.collateral(tables)).encode()
        evidence = Evidence(kind, self.quote(version, tee, body), {"collateral": collateral}, binding)
        if tee:
            reference = TdxReference(measurements={"mrtd": ("33" * 48,), "rtmr3": ("43" * 48,)})
        else:
            reference = SgxReference(measurements={"mrenclave": ("11" * 32,)}, product_id=1, min_svn=5)
        return Case(evidence, Policy({kind: reference}, {kind: (self.root.parsed,)}), binding, NOW)


def _point(key: ec.EllipticCurvePrivateKey) -> bytes:
    numbers = key.public_key().public_numbers()
    return numbers.x.to_bytes(32, "big") + numbers.y.to_bytes(32, "big")
