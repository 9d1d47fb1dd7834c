"""A simulation of a TEE for development: NOT SECURE, and refused unless a policy allows it by name."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from phalanx.config import canonical_json
from phalanx.errors import RefusedEvidenceError
from phalanx.security.crypto import Identity, in_domain, parse_canonical
from phalanx.security.tee.binding import Binding
from phalanx.security.tee.claims import Backend, Claims, Reference
from phalanx.security.tee.evidence import Evidence
from phalanx.security.tee.formats.chain import Trust
from phalanx.security.tee.formats.reader import malformed_error
from phalanx.security.tee.refusal_reason import RefusedEvidenceReason

_DOMAIN = "sim-evidence/1"
_KEYS = {"measurement", "report_data", "debug", "key", "signature"}
_WHERE = "simulated evidence"


class SimReference(Reference):
    """Reference values for the simulation. Measurements: ``code``, whatever the attester says it runs."""


class SimAttester:
    """Attester of the simulation."""

    kind = "sim"

    def __init__(self, identity: Identity, measurement: bytes) -> None:
        self._identity = identity
        self._measurement = measurement

    def make_evidence(self, binding: Binding) -> Evidence:
        """Make simulated evidence for a binding."""
        return make_sim_evidence(self._identity, self._measurement, binding)


def make_sim_evidence(identity: Identity, measurement: bytes, binding: Binding, *, debug: bool = False) -> Evidence:
    """Make simulated evidence, signed by a key that any party could have."""
    body: dict[str, Any] = {
        "measurement": measurement.hex(),
        "report_data": binding.binding_digest().hex(),
        "debug": debug,
        "key": identity.public.public_key.hex(),
    }
    signature = identity.sign_data(in_domain(_DOMAIN, canonical_json(body)))
    return Evidence("sim", canonical_json({**body, "signature": signature.hex()}), {}, binding)


def appraise_sim(evidence: Evidence, reference: Reference, trust: Trust) -> Claims:
    """Run every check on simulated evidence, though its key has no hardware behind it."""
    del reference, trust
    evidence.check_names(set())
    body = _read_body(evidence.data)
    signature, key = _decode_hex(body.pop("signature")), _decode_hex(body["key"])
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, in_domain(_DOMAIN, canonical_json(body)))
    except InvalidSignature as exc:
        raise RefusedEvidenceError(
            RefusedEvidenceReason.BAD_SIGNATURE, f"{_WHERE}: the signature does not match"
        ) from exc
    except ValueError as exc:
        raise malformed_error(_WHERE, "its key") from exc
    if body["debug"]:
        raise RefusedEvidenceError(RefusedEvidenceReason.DEBUG_ENABLED, f"{_WHERE}: says that it is in debug mode")
    return Claims(
        kind="sim",
        measurements={"code": body["measurement"]},
        report_data=_decode_hex(body["report_data"]),
        expires=datetime.max.replace(tzinfo=UTC),
        device=body["key"],
        notes=("NOT SECURE: a simulation proves nothing",),
    )


def inspect_sim(evidence: Evidence) -> Mapping[str, str]:
    """Read the measurement without appraising anything."""
    return {"code": _read_body(evidence.data)["measurement"]}


def _read_body(data: bytes) -> dict[str, Any]:
    try:
        body = parse_canonical(data)
    except ValueError as exc:
        raise malformed_error(_WHERE, str(exc)) from exc
    if set(body) != _KEYS or not isinstance(body["debug"], bool):
        raise malformed_error(_WHERE, f"expected the keys {', '.join(sorted(_KEYS))}")
    for name in _KEYS - {"debug"}:
        _decode_hex(body[name])
    return body


def _decode_hex(value: Any) -> bytes:
    if not isinstance(value, str) or value != value.lower():
        raise malformed_error(_WHERE, "a value is not lowercase hex")
    try:
        return bytes.fromhex(value)
    except ValueError as exc:
        raise malformed_error(_WHERE, "a value is not lowercase hex") from exc


SIM = Backend(SimReference, appraise_sim, inspect_sim, needs_roots=False)
