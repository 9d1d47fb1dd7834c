"""The list of revoked certificates: the parties on it are let into no run, and their keys are certified no more.

AUTHORITY_DIR/revoked.json, 0600
"""

import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from phalanx.config import StrictModel, printable_text
from phalanx.errors import CertificateError
from phalanx.security.crypto.certificate import certificate_facts
from phalanx.security.crypto.clock import steady_now
from phalanx.security.crypto.counter import lock_file
from phalanx.security.crypto.files import MAX_FILE_BYTES, read_private, read_public, write_public
from phalanx.security.crypto.identity import Peer, check_party_name

REVOKED_FILE = "revoked.json"
LONGEST_REASON = 200
_NEVER = "owner"


class Revocation(StrictModel):
    """A certificate that was taken back.

    Attributes:
        message_key: The message key in it, in hex.
        time: Second since 1970 at which it was taken back.
        reason: The owner's explanation, for people.
    """

    party: Annotated[str, Field(max_length=63)]
    message_key: Annotated[str, Field(pattern=r"^[0-9a-f]{64}\z")]
    time: Annotated[int, Field(ge=0, le=2**40)]
    reason: Annotated[str, Field(max_length=LONGEST_REASON)]


class _RevokedFile(StrictModel):
    version: Literal[1] = 1
    revoked: tuple[Revocation, ...] = ()


class RevokedParties:
    """The revocations of one authority.

    Guarantees:
        A list that is there and cannot be read, or that others may read or write, is an error and never an empty list.
        What is on it stays on it.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._path = directory / REVOKED_FILE

    def read_revocations(self) -> dict[str, Revocation]:
        """Return the revocations by party."""
        return {revocation.party: revocation for revocation in self._read_file().revoked}

    def check_not_revoked(self, party: str, keys: Peer | None = None) -> None:
        """Return where neither a name nor the keys that are to have it are revoked."""
        for revocation in self._read_file().revoked:
            if party == revocation.party:
                raise CertificateError(f"{party} was revoked and stays so; choose another name")
            if keys is not None and keys.public_key.hex() == revocation.message_key:
                raise CertificateError(
                    f"{party} shows the keys of {revocation.party}, which were revoked; make new ones"
                )

    def revoke_party(self, party: str, reason: str) -> Revocation:
        """Revoke the certificate of a party, or return its earlier revocation.

        Raises:
            CertificateError: It has none, it is the owner, the list is full, or it cannot be read.
        """
        check_party_name(party)
        if party == _NEVER:
            raise CertificateError(f"{party} cannot be revoked by its own list; make a new authority")
        with lock_file(self._path):
            file = self._read_file()
            revocation = next((entry for entry in file.revoked if entry.party == party), None)
            if revocation is None:
                revocation = self._make_revocation(party, reason)
                self._write_file(_RevokedFile(revoked=(*file.revoked, revocation)))
            return revocation

    def _make_revocation(self, party: str, reason: str) -> Revocation:
        path = self._directory / party / "certificate.pem"
        facts = certificate_facts(read_public(path), str(path))
        if facts.peer is None or facts.peer.name != party:
            raise CertificateError(f"{path}: is no certificate of {party}")
        return Revocation(
            party=party,
            message_key=facts.peer.public_key.hex(),
            time=int(steady_now().timestamp()),
            reason=printable_text(reason, LONGEST_REASON),
        )

    def _read_file(self) -> _RevokedFile:
        if not self._path.exists() and not self._path.is_symlink():
            return _RevokedFile()
        try:
            return _RevokedFile.model_validate_json(read_private(self._path, "phalanx peers --revoke makes it"))
        except ValidationError as exc:
            raise CertificateError(
                f"{self._path}: is no list of revocations, so no party is admitted; restore it"
            ) from exc

    def _write_file(self, content: _RevokedFile) -> None:
        data = json.dumps(content.model_dump(mode="json"), indent=1).encode()
        if len(data) > MAX_FILE_BYTES:
            raise CertificateError(f"{self._path}: is full; make a new authority")
        # the writer of public files makes 0600 as well, and replaces what is there at once
        write_public(self._path, data)
