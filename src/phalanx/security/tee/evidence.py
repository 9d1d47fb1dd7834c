"""The envelope in which evidence travels: a tag for its kind, the vendor's bytes, and what appraising them needs."""

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.config import canonical_json
from phalanx.errors import ConfigError, RefusedEvidenceError
from phalanx.security.crypto.canonical import parse_canonical
from phalanx.security.tee.binding import Binding
from phalanx.security.tee.formats.reader import malformed_error
from phalanx.security.tee.refusal_reason import RefusedEvidenceReason

FORMAT = 1
MAX_ENVELOPE_BYTES = 4 * 1024 * 1024
_KEYS = {"phalanx_evidence", "kind", "evidence", "endorsements", "statement"}
_STATED = {"nonce", "tls_key", "run", "role"}


@dataclass(frozen=True)
class Evidence:
    """Evidence as an attester sends it.

    Attributes:
        kind: Name in `BACKENDS`, such as ``snp``.
        data: The vendor's own structure, byte for byte.
        endorsements: Certificates and collateral by name; which names there are is the kind's business.
        statement: The attester's statement about its binding; unsigned, used only to name the wrong part.
    """

    kind: str
    data: bytes = field(repr=False)
    endorsements: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    statement: Binding | None = None

    def find_endorsement(self, name: str) -> bytes:
        """Return one endorsement."""
        document = self.endorsements.get(name)
        if document is None:
            raise RefusedEvidenceError(
                RefusedEvidenceReason.MISSING_ENDORSEMENT, f"{self.kind}: {name!r} was not sent along"
            )
        return document

    def check_names(self, known: set[str]) -> None:
        """Check that no endorsement came along that the appraisal of this kind would not read."""
        unknown = sorted(set(self.endorsements) - known)
        if unknown:
            raise malformed_error(
                self.kind, f"endorsement {unknown[0][:40]!r} is unknown; known: {', '.join(sorted(known))}"
            )

    def to_bytes(self) -> bytes:
        """Write the envelope: canonical JSON, binary parts in base64."""
        value: dict[str, Any] = {
            "phalanx_evidence": FORMAT,
            "kind": self.kind,
            "evidence": _encode_bytes(self.data),
            "endorsements": {name: _encode_bytes(data) for name, data in self.endorsements.items()},
            "statement": None,
        }
        if (stated := self.statement) is not None:
            value["statement"] = {
                "nonce": stated.nonce.hex(),
                "tls_key": stated.tls_key.hex(),
                "run": stated.run.hex(),
                "role": stated.role,
            }
        return canonical_json(value)


def read_endorsements(files: Mapping[str, str]) -> dict[str, bytes]:
    """Read the files that a run file or a client's file names as endorsements.

    Raises:
        ConfigError: One cannot be read.
    """
    try:
        return {name: Path(path).read_bytes() for name, path in files.items()}
    except OSError as exc:
        raise ConfigError(f"endorsements: {exc.filename}: cannot be read ({exc.strerror})") from exc


def parse_evidence(data: bytes) -> Evidence:
    """Read an envelope.

    Raises:
        RefusedEvidenceError: It is not exactly one envelope in canonical JSON.
    """
    if len(data) > MAX_ENVELOPE_BYTES:
        raise malformed_error("envelope", f"{len(data)} bytes, allowed {MAX_ENVELOPE_BYTES}")
    try:
        value = parse_canonical(data)
    except ValueError as exc:
        raise malformed_error("envelope", f"{exc}; make one with phalanx enclave pack") from exc
    if set(value) != _KEYS or value["phalanx_evidence"] != FORMAT or isinstance(value["phalanx_evidence"], bool):
        raise malformed_error("envelope", f"expected the keys {', '.join(sorted(_KEYS))} and format {FORMAT}")
    kind, endorsements = value["kind"], value["endorsements"]
    if not isinstance(kind, str) or not isinstance(endorsements, dict):
        raise malformed_error("envelope", "kind must be text and endorsements an object")
    return Evidence(
        kind=kind,
        data=_decode_text(value["evidence"], "evidence"),
        endorsements={name: _decode_text(text, f"endorsement {name[:40]!r}") for name, text in endorsements.items()},
        statement=_read_statement(value["statement"]),
    )


def _read_statement(value: Any) -> Binding | None:
    if value is None:
        return None
    if (
        not isinstance(value, dict)
        or set(value) != _STATED
        or not all(isinstance(value_text, str) for value_text in value.values())
    ):
        raise malformed_error("envelope", f"its statement must have the keys {', '.join(sorted(_STATED))}, all text")
    try:
        raw = {name: bytes.fromhex(value[name]) for name in ("nonce", "tls_key", "run")}
        return Binding(**raw, role=value["role"])
    except ValueError as exc:
        raise malformed_error("envelope", f"its statement: {exc}") from exc


def _encode_bytes(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _decode_text(text: Any, where: str) -> bytes:
    if not isinstance(text, str):
        raise malformed_error("envelope", f"{where} must be base64 text")
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as exc:
        raise malformed_error("envelope", f"{where} is not base64") from exc
    # the last character of base64 has spare bits: two texts must not stand for one evidence
    if _encode_bytes(data) != text:
        raise malformed_error("envelope", f"{where} is not in the one form of base64")
    return data
