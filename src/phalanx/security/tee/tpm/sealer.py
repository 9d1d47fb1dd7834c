"""Secrets that one TPM gives back to one state of its machine."""

import struct
from collections.abc import Iterable
from typing import Any

from phalanx.config import canonical_json
from phalanx.errors import CheckpointError, TpmError
from phalanx.security.crypto import parse_canonical
from phalanx.security.tee.tpm import wire
from phalanx.security.tee.tpm.attester import DEFAULT_PCRS
from phalanx.security.tee.tpm.device import TpmDevice
from phalanx.security.tee.tpm.wire import TpmCommand

MAX_SECRET_BYTES = 128
_KEYS = {"phalanx_tpm_sealed", "pcrs", "public", "private"}
_FORMAT = 1
_WHERE = "sealed secret"
_WRONG_STATE = 0x1D
"""TPM_RC_POLICY_FAIL; which session is meant stands in other bits."""


class TpmSealer:
    """A sealer to the present values of PCRs; it unseals in the same TPM while they are the same again.

    An older sealed secret opens as well as a newer one: what must not be turned back needs a counter beside it.

    Args:
        pcrs: PCRs that stand for the state, of the SHA-256 bank.
    """

    def __init__(self, tpm: TpmDevice, pcrs: Iterable[int] = DEFAULT_PCRS) -> None:
        self._tpm, self._pcrs = tpm, tuple(sorted(set(pcrs)))

    def seal_secret(self, secret: bytes | bytearray) -> bytes:
        """Seal a key of at most 128 bytes; the result may lie anywhere."""
        if not 1 <= len(secret) <= MAX_SECRET_BYTES:
            raise TpmError(f"{_WHERE}: {len(secret)} bytes, a TPM takes 1 to {MAX_SECRET_BYTES}; seal a key instead")
        policy = wire.pcr_policy(wire.pcr_selection(self._pcrs), self._tpm.read_pcrs(self._pcrs).values())
        parameters = wire.sensitive_area(bytes(secret)) + wire.size_prefixed(wire.sealed_object(policy))
        parameters += wire.size_prefixed(b"") + struct.pack(">I", 0)
        with self._tpm.primary_key(wire.OWNER, wire.storage_key()) as (parent, _):
            answer = self._tpm.send_command(TpmCommand.CREATE, (parent,), parameters, wire.password_authorisation())
        private, public = answer.read_sized(2, 1024), answer.read_sized(2, 1024)
        plain = {"phalanx_tpm_sealed": _FORMAT, "pcrs": list(self._pcrs)}
        return canonical_json({**plain, "public": public.hex(), "private": private.hex()})

    def unseal_secret(self, sealed: bytes) -> bytearray:
        """Return the secret.

        Raises:
            TpmError: The PCRs have other values than when it was sealed, or it is another TPM's.
        """
        pcrs, public, private = _parse_sealed(sealed)
        with self._tpm.primary_key(wire.OWNER, wire.storage_key()) as (parent, _):
            parameters = wire.size_prefixed(private) + wire.size_prefixed(public)
            item, _ = self._tpm.make_object(TpmCommand.LOAD, (parent,), parameters, wire.password_authorisation())
        try:
            with self._tpm.policy_session() as session:
                self._tpm.send_command(
                    TpmCommand.POLICY_PCR, (session,), wire.size_prefixed(b"") + wire.pcr_selection(pcrs)
                )
                answer = self._tpm.send_command(TpmCommand.UNSEAL, (item,), b"", wire.session_authorisation(session))
                return bytearray(answer.read_sized(2, MAX_SECRET_BYTES))
        except TpmError as exc:
            if exc.response & 0x3F != _WRONG_STATE:
                raise
            raise TpmError(
                f"{_WHERE}: PCRs {', '.join(map(str, pcrs))} have other values than when it was sealed; this machine "
                "runs something else, or was updated",
                exc.response,
            ) from exc
        finally:
            self._tpm.flush_object(item)


def _parse_sealed(sealed: bytes) -> tuple[tuple[int, ...], bytes, bytes]:
    try:
        value: Any = parse_canonical(sealed)
        if set(value) != _KEYS or value["phalanx_tpm_sealed"] != _FORMAT:
            raise CheckpointError(f"{_WHERE}: expected the keys {', '.join(sorted(_KEYS))} and format {_FORMAT}")
        pcrs = value["pcrs"]
        if not isinstance(pcrs, list) or not all(type(pcr) is int for pcr in pcrs):
            raise CheckpointError(f"{_WHERE}: pcrs is no list of numbers")
        return tuple(pcrs), bytes.fromhex(value["public"]), bytes.fromhex(value["private"])
    except (ValueError, TypeError) as exc:
        raise CheckpointError(f"{_WHERE}: malformed ({exc})") from exc
