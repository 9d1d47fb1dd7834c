"""SNP reports and TDX quotes, read from Linux's configfs.

Tested on a fixture tree and with published evidence; the hardware path is not tested by us.

Source: Linux, Documentation/ABI/testing/configfs-tsm-report; AMD 56421 (GHCB), certificate table of an extended report.
"""

import base64
import secrets
import textwrap
import uuid
from collections.abc import Mapping
from pathlib import Path

from phalanx.errors import NoEvidenceError, RefusedEvidenceError
from phalanx.security.tee.binding import Binding
from phalanx.security.tee.evidence import Evidence
from phalanx.security.tee.formats.reader import ByteReader

REPORTS = Path("sys/kernel/config/tsm/report")
PROVIDERS = {"sev_guest": "snp", "tdx_guest": "tdx"}
"""Kind of evidence by the kernel's name of its driver."""
_REPORT_DATA_BYTES = 64
_MAX_CERTIFICATES = 16
_VCEK, _VLEK, _ASK, _ARK, _CRL = (
    uuid.UUID(name)
    for name in (
        "63da758d-e664-4564-adc5-f4b93be8accd",
        "a8074bc2-a25a-483e-aae6-39c045a0b8a1",
        "4ab7b379-bbac-4fe4-a02f-05aef327c782",
        "c0b406a4-a803-4952-9743-3fb6014cd0ae",
        "92f81bc3-5811-4d3d-97ff-d19f88dc67ea",
    )
)


class ReportEntries:
    """Directories of configfs: the kernel fills one when it is made, and empties it when it is removed."""

    def make_entry(self, entry: Path) -> None:
        """Begin a request."""
        entry.mkdir()

    def remove_entry(self, entry: Path) -> None:
        """End a request."""
        entry.rmdir()


_ENTRIES = ReportEntries()


class TsmAttester:
    """An attester that asks the kernel for a report over a binding; one directory per request, removed afterwards.

    Args:
        kind: ``snp`` or ``tdx``.
        endorsements: Named documents that are sent beside the host's own ones, such as ``collateral``.
    """

    def __init__(
        self,
        kind: str,
        root: Path = Path("/"),
        endorsements: Mapping[str, bytes] | None = None,
        entries: ReportEntries = _ENTRIES,
    ) -> None:
        self.kind = kind
        self._reports, self._entries = root / REPORTS, entries
        self._endorsements = dict(endorsements or {})

    def make_evidence(self, binding: Binding) -> Evidence:
        """Have the hardware sign a binding.

        Raises:
            NoEvidenceError: The kernel offers no such reports, refuses, or another process used the same entry.
        """
        entry = self._reports / f"phalanx-{secrets.token_hex(8)}"
        try:
            self._entries.make_entry(entry)
            try:
                return self._read_evidence(entry, binding)
            finally:
                self._entries.remove_entry(entry)
        except OSError as exc:
            raise NoEvidenceError(
                f"{exc.filename or entry}: {exc.strerror}; {self.kind} evidence needs Linux 6.7 in a confidential "
                "machine, configfs mounted, and the rights of root"
            ) from exc

    def _read_evidence(self, entry: Path, binding: Binding) -> Evidence:
        provider = _read_provider(entry)
        if PROVIDERS.get(provider) != self.kind:
            raise NoEvidenceError(f"{entry}: the kernel's provider is {provider[:40]!r}, which gives no {self.kind}")
        (entry / "inblob").write_bytes(binding.binding_digest().ljust(_REPORT_DATA_BYTES, b"\0"))
        report = (entry / "outblob").read_bytes()
        sent = _read_certificates((entry / "auxblob").read_bytes()) if self.kind == "snp" else {}
        # every write raises it: more than one means that the report is about another process's data
        if (generation := (entry / "generation").read_text(encoding="ascii").strip()) != "1":
            raise NoEvidenceError(f"{entry}: generation {generation[:20]}, expected 1; somebody else writes to it")
        return Evidence(self.kind, report, {**sent, **self._endorsements}, binding)


def provider_kind(root: Path = Path("/"), entries: ReportEntries = _ENTRIES) -> str | None:
    """Return which kind the kernel offers; None where it offers none, or not to this user."""
    entry = root / REPORTS / f"phalanx-{secrets.token_hex(8)}"
    try:
        entries.make_entry(entry)
        try:
            return PROVIDERS.get(_read_provider(entry))
        finally:
            entries.remove_entry(entry)
    except OSError:
        return None


def _read_provider(entry: Path) -> str:
    return (entry / "provider").read_text(encoding="ascii").strip().replace("-", "_")


def _read_certificates(table: bytes) -> dict[str, bytes]:
    """Read the table of certificates that the host sends along; none where it sends none. Nothing in it is believed."""
    if not any(table):
        return {}
    try:
        certificates = _read_table(table)
    except RefusedEvidenceError as exc:
        raise NoEvidenceError(exc.detail) from exc
    named = {
        name: certificates[guid]
        for guid, name in ((_VCEK, "vcek"), (_VLEK, "vlek"), (_CRL, "crl"))
        if guid in certificates
    }
    chain = b"".join(_as_pem(certificates[guid]) for guid in (_ASK, _ARK) if guid in certificates)
    return {**named, "chain": chain} if chain else named


def _read_table(data: bytes) -> dict[uuid.UUID, bytes]:
    reader = ByteReader(data, "SNP certificate table")
    certificates: dict[uuid.UUID, bytes] = {}
    for _ in range(_MAX_CERTIFICATES):
        raw, offset, size = reader.take_bytes(16), reader.read_unsigned(4), reader.read_unsigned(4)
        if not any(raw):
            break
        part = ByteReader(data, "SNP certificate table")
        part.take_bytes(offset)
        certificate = part.take_bytes(size)
        # written as the digits stand in print; some hosts reverse the first three groups
        for guid in (uuid.UUID(bytes=raw), uuid.UUID(bytes_le=raw)):
            certificates[guid] = certificate
    return certificates


def _as_pem(certificate: bytes) -> bytes:
    if certificate.lstrip().startswith(b"-----BEGIN"):
        return certificate.strip() + b"\n"
    lines = "\n".join(textwrap.wrap(base64.b64encode(certificate).decode("ascii"), 64))
    return f"-----BEGIN CERTIFICATE-----\n{lines}\n-----END CERTIFICATE-----\n".encode("ascii")
