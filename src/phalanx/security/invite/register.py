"""The owner's register of invitations: a hash of each secret, and the keys that used it.

AUTHORITY_DIR/invitations/NAME.json, 0600
"""

import contextlib
import hmac
import json
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from phalanx.config import StrictModel
from phalanx.errors import CertificateError, PeerRefusedError
from phalanx.security.crypto import (
    Revocation,
    RevokedParties,
    certificate_fingerprint,
    check_party_name,
    digest_hex,
    load_authority,
    lock_file,
    make_private_directory,
    read_private,
    read_request,
    sign_request,
    steady_now,
    write_public,
)
from phalanx.security.invite.token import JoinToken, secret_digest

_Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
_NO_SUCH = secret_digest("")


class _Entry(StrictModel):
    version: Literal[1] = 1
    secret_digest: _Digest
    expires: int
    used_by: _Digest | None = None
    """Digest of the message key that was certified for it."""
    taken_back: bool = False


class Invitations:
    """The invitations to the runs of one authority.

    Args:
        now: Time of day; may be set for tests.

    Guarantees:
        A secret is never written. It certifies one pair of keys, before it expires or is taken back, under the name
        that it was made for; no answer shows whether a name is invited.
    """

    def __init__(self, directory: Path, now: Callable[[], datetime] = steady_now) -> None:
        self._directory = directory
        self._now = now

    def invite_party(self, name: str, address: str, lasts: timedelta) -> JoinToken:
        """Make a token for a party; an earlier one for the same name is void from now on.

        One that is certified already is invited to a further run so: its own keys alone are let in with the token.

        Raises:
            CertificateError: No authority, a malformed name, or one that was revoked.
            ConfigError: The address is malformed.
        """
        check_party_name(name)
        authority = certificate_fingerprint(load_authority(self._directory / "authority.pem"))
        RevokedParties(self._directory).check_not_revoked(name)
        token = JoinToken.with_fresh_secret(name, address, authority, self._now() + lasts)
        with self._lock_entries():
            self._write_entry(name, _Entry(secret_digest=secret_digest(token.secret), expires=token.expires))
        return token

    def open_names(self) -> list[str]:
        """Return the names of invited parties that have not come yet."""
        if not self._entries_directory.is_dir():
            return []
        names = sorted(path.stem for path in self._entries_directory.glob("*.json"))
        entries = {name: self._read_entry(name) for name in names}
        return [name for name, entry in entries.items() if entry is not None and self._is_open(entry)]

    def revoke_party(self, name: str, reason: str) -> tuple[bool, Revocation | None]:
        """Revoke the unused invitation of a party, and its certificate.

        Returns:
            Whether there was an open invitation, and the revocation of the certificate; None without a certificate.
        """
        check_party_name(name)
        with self._lock_entries():
            entry = self._read_entry(name)
            was_open = entry is not None and self._is_open(entry)
            is_certified = (self._directory / name / "certificate.pem").exists()
            if not (was_open or is_certified):
                raise CertificateError(f"{name} is neither invited nor certified in {self._directory}")
            if entry is not None:
                self._write_entry(name, entry.model_copy(update={"taken_back": True}))
            return was_open, RevokedParties(self._directory).revoke_party(name, reason) if is_certified else None

    def admit_party(self, name: str, secret: str, request: bytes) -> Path:
        """Certify the keys in a request that shows the secret of an invitation.

        Asked again by the same keys, as after an answer that was lost, it gives the same certificate.

        Raises:
            PeerRefusedError: Wrong, used, expired or taken back.
        """
        with self._lock_entries():
            entry = self._valid_entry(name, secret)
            keys = digest_hex(read_request(request, f"request of {name}").peer.public_key)
            if entry.used_by not in (None, keys):
                raise PeerRefusedError(
                    f"the token of {name} was used already, with other keys than these; if that was not you, tell the "
                    f"owner at once: somebody else is {name}"
                )
            home = sign_request(self._directory, request, name=name, where=f"request of {name}")
            self._write_entry(name, entry.model_copy(update={"used_by": keys}))
            return home

    def check_secret(self, name: str, secret: str) -> None:
        """Return where a secret is that of an invitation which still counts, whether its keys are made or not."""
        with self._lock_entries():
            self._valid_entry(name, secret)

    def _valid_entry(self, name: str, secret: str) -> _Entry:
        check_party_name(name)
        entry = self._read_entry(name)
        digest = _NO_SUCH if entry is None else entry.secret_digest
        is_right = hmac.compare_digest(digest, secret_digest(secret))
        if entry is None or not is_right:
            raise PeerRefusedError("this token is not valid here: it is wrong, or a newer one has replaced it")
        if entry.taken_back:
            raise PeerRefusedError(f"the token of {name} was taken back by the owner")
        if self._is_expired(entry):
            raise PeerRefusedError(f"the token of {name} has expired; ask for a new one")
        return entry

    def _is_open(self, entry: _Entry) -> bool:
        return not (entry.used_by or entry.taken_back or self._is_expired(entry))

    def _is_expired(self, entry: _Entry) -> bool:
        return self._now().timestamp() >= entry.expires

    @property
    def _entries_directory(self) -> Path:
        return self._directory / "invitations"

    def _lock_entries(self) -> "contextlib.AbstractContextManager[None]":
        make_private_directory(self._entries_directory)
        return lock_file(self._entries_directory / "all")

    def _read_entry(self, name: str) -> _Entry | None:
        path = self._entries_directory / f"{name}.json"
        if not path.exists():
            return None
        try:
            return _Entry.model_validate_json(read_private(path, "phalanx invite makes it"))
        except ValidationError as exc:
            raise CertificateError(f"{path}: is no invitation; remove it and invite again") from exc

    def _write_entry(self, name: str, entry: _Entry) -> None:
        # the writer of public files makes 0600 as well, and replaces what is there at once
        write_public(self._entries_directory / f"{name}.json", json.dumps(entry.model_dump()).encode())
