"""The attester's side of a TPM: quotes over a binding, and the answer to an enrolment."""

import hashlib
from collections.abc import Iterable, Mapping

from phalanx.closing import Closeable
from phalanx.config import canonical_json
from phalanx.errors import RefusedEvidenceError, TpmError
from phalanx.security.tee.binding import Binding
from phalanx.security.tee.evidence import Evidence
from phalanx.security.tee.tpm import wire
from phalanx.security.tee.tpm.device import TpmDevice
from phalanx.security.tee.tpm.enrol import Enrolment
from phalanx.security.tee.tpm.structures import parse_quote_and_signature
from phalanx.security.tee.tpm.wire import TpmCommand

DEFAULT_PCRS = (0, 1, 2, 3, 4, 5, 6, 7)
EK_CERTIFICATE_INDEX = 0x01C00002
"""NV index of the certificate of the RSA 2048 endorsement key, by the TCG's profile."""
_ATTEMPTS = 3


class TpmAttester(Closeable):
    """An attester with an attestation key that never leaves its TPM.

    The key is derived from the TPM's endorsement seed: it is the same after every start, and needs no storage.

    Args:
        tpm: Used by this object and by others in turn.
        pcrs: PCRs to quote, of the SHA-256 bank.
        endorsements: Named documents that are sent with each piece of evidence, such as ``ek_certificate`` and
            ``chain``.
    """

    kind = "tpm"

    def __init__(
        self,
        tpm: TpmDevice,
        pcrs: Iterable[int] = DEFAULT_PCRS,
        endorsements: Mapping[str, bytes] | None = None,
    ) -> None:
        self._tpm, self._pcrs, self._endorsements = tpm, tuple(sorted(set(pcrs))), dict(endorsements or {})
        self._ak, self._public = tpm.make_primary(wire.ENDORSEMENT, wire.attestation_key())
        self._is_open = True

    @property
    def ak_public(self) -> bytes:
        """The key's public area (TPMT_PUBLIC), for `begin_enrolment`."""
        return self._public

    @property
    def ek_certificate(self) -> bytes:
        """The vendor's certificate of the endorsement key, in DER, as the TPM keeps it."""
        return self._tpm.read_memory(EK_CERTIFICATE_INDEX)

    def make_evidence(self, binding: Binding) -> Evidence:
        """Have the TPM sign a binding together with its PCRs.

        Raises:
            TpmError: The TPM refuses, or PCRs change faster than they can be read.
        """
        quote, pcrs = quote_binding(self._tpm, self._ak, self._pcrs, binding)
        return Evidence(self.kind, quote, {"ak": self._public, "pcrs": pcrs, **self._endorsements}, binding)

    def activate_credential(self, enrolment: Enrolment) -> bytes:
        """Read an enrolment's secret, which only the TPM with both keys can; `Enrolment.finish_enrolment` takes it.

        Raises:
            TpmError: The secret was not made for this TPM and this key.
        """
        with (
            self._tpm.primary_key(wire.ENDORSEMENT, wire.endorsement_key()) as (ek, _),
            self._tpm.policy_session() as session,
        ):
            nothing = wire.size_prefixed(b"") * 3 + bytes(4)
            self._tpm.send_command(
                TpmCommand.POLICY_SECRET, (wire.ENDORSEMENT, session), nothing, wire.password_authorisation()
            )
            parameters = enrolment.credential + enrolment.encrypted_secret
            authorised = (wire.password_authorisation(), wire.session_authorisation(session))
            return self._tpm.send_command(
                TpmCommand.ACTIVATE_CREDENTIAL, (self._ak, ek), parameters, *authorised
            ).read_sized(2, 64)

    def close(self) -> None:
        """Remove the key from the TPM; closing twice is harmless."""
        if self._is_open:
            self._is_open = False
            self._tpm.flush_object(self._ak)


def quote_binding(tpm: TpmDevice, key: int, pcrs: tuple[int, ...], binding: Binding) -> tuple[bytes, bytes]:
    """Have a key of a TPM sign a binding together with PCRs; return the quote, and the values as ``pcrs``.

    Raises:
        TpmError: The TPM refuses, or PCRs change faster than they can be read.
    """
    parameters = wire.size_prefixed(binding.binding_digest()) + b"\0\x10" + wire.pcr_selection(pcrs)
    for _ in range(_ATTEMPTS):
        answer = tpm.send_command(TpmCommand.QUOTE, (key,), parameters, wire.password_authorisation())
        quote, values = answer.take_bytes(answer.bytes_left), tpm.read_pcrs(pcrs)
        if _matches_values(quote, values):
            plain = {"sha256": {str(index): value.hex() for index, value in values.items()}}
            return quote, canonical_json(plain)
    raise TpmError(f"TPM: PCRs {pcrs} changed between quote and reading, {_ATTEMPTS} times")


def _matches_values(quote: bytes, values: Mapping[int, bytes]) -> bool:
    """Whether a quote speaks of these values; others extend PCRs at any time."""
    try:
        _, parsed, _ = parse_quote_and_signature(quote)
    except RefusedEvidenceError as exc:
        raise TpmError(f"TPM: its quote cannot be read ({exc.detail})") from exc
    return parsed.digest == hashlib.sha256(b"".join(values.values())).digest()
