"""The claims that an appraiser reads out of evidence with sound signatures, and the reference values beside them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from pydantic import Field, field_validator

from phalanx.config import StrictModel
from phalanx.errors import RefusedEvidenceError
from phalanx.security.tee.evidence import Evidence
from phalanx.security.tee.formats.chain import Trust
from phalanx.security.tee.refusal_reason import RefusedEvidenceReason


@dataclass(frozen=True)
class Claims:
    """The claims that one piece of evidence proves.

    Attributes:
        measurements: Hex by name; the names are the kind's, such as ``launch``, ``mrtd``, ``pcr0``.
        report_data: Data that the attester had the hardware sign.
        expires: Earliest end of a certificate or collateral that was used.
        tcb: Versions of firmware and microcode, or the vendor's word for them.
        debug_off: Whether the evidence proves that debugging is off; some kinds do not say.
        device: Id of the chip or module, in hex or text; empty where the evidence has none.
        notes: Sentences about checks that were omitted.
    """

    kind: str
    measurements: Mapping[str, str]
    report_data: bytes
    expires: datetime
    tcb: Mapping[str, int | str] = field(default_factory=dict)
    debug_off: bool = True
    device: str = ""
    notes: tuple[str, ...] = ()


class Reference(StrictModel):
    """Reference values of one kind; each kind adds its own.

    Attributes:
        measurements: Accepted values, in hex, by the measurement's name. At least one name must be given.
        roots: PEM files with the vendor's roots, relative to the policy, or their text; the packaged ones if empty.
        crls: DER files with revocation lists.
    """

    measurements: dict[str, tuple[str, ...]] = Field(min_length=1)
    roots: tuple[str, ...] = ()
    crls: tuple[str, ...] = ()

    @field_validator("measurements")
    @classmethod
    def _plain_hex(cls, value: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
        for name, accepted in value.items():
            if not accepted:
                raise ValueError(f"{name}: no accepted value, so nothing could pass; give one or leave the name out")
            for digest in accepted:
                if digest != digest.lower() or not digest or len(digest) % 2 or set(digest) - set("0123456789abcdef"):
                    raise ValueError(f"{name}: {digest[:24]!r} is not lowercase hex")
        return value


@dataclass(frozen=True)
class Backend:
    """One kind of evidence: its reference values and its functions.

    Attributes:
        appraise: Checks signatures, chain, TCB and mode; returns the proven claims.
        inspect: Reads measurements out of evidence without appraising it.
        packaged_roots: File names in ``roots/``.
        needs_roots: Whether nothing of the kind can pass without a pinned root.
        manifest_roots: File names in ``roots/`` of the authorities that sign the vendor's reference values.
    """

    reference: type[Reference]
    appraise: Callable[[Evidence, Reference, Trust], Claims]
    inspect: Callable[[Evidence], Mapping[str, str]]
    packaged_roots: tuple[str, ...] = ()
    needs_roots: bool = True
    manifest_roots: tuple[str, ...] = ()


def check_measurements(measurements: Mapping[str, str], reference: Reference, revoked: frozenset[str]) -> None:
    """Compare measurements with reference values.

    Raises:
        RefusedEvidenceError: One that the policy names is absent or has another value, or any is revoked.
    """
    for name, value in measurements.items():
        if value in revoked:
            raise RefusedEvidenceError(
                RefusedEvidenceReason.REVOKED, f"measurement {name} {value[:16]}... is revoked by the policy"
            )
    for name, accepted in reference.measurements.items():
        value = measurements.get(name, "")
        if value not in accepted:
            description = (
                f"{value[:16]}..." if value else f"absent; the evidence has {', '.join(sorted(measurements)) or 'none'}"
            )
            raise RefusedEvidenceError(
                RefusedEvidenceReason.WRONG_MEASUREMENT,
                f"{name} is {description}; the policy accepts {', '.join(f'{digest[:16]}...' for digest in accepted)}",
            )
