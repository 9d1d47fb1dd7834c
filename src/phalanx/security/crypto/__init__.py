"""Digests, identities, certificates and counters: the only place that touches keys."""

from phalanx.security.crypto.canonical import DIGEST_PATTERN, digest_hex, in_domain, parse_canonical
from phalanx.security.crypto.certificate import (
    certificate_facts,
    fingerprint,
    peer_from_certificate,
    tls_server_name,
)
from phalanx.security.crypto.clock import boot_name, steady_now
from phalanx.security.crypto.counter import (
    MonotonicCounter,
    NotRollbackProofCounter,
    lock_file,
    read_number,
    write_number,
)
from phalanx.security.crypto.files import make_private_directory, read_private, read_public, write_private, write_public
from phalanx.security.crypto.identity import (
    SESSION_NAME,
    Identity,
    Peer,
    certified_name,
    check_party_name,
    check_session_name,
    incarnation_of,
    name_of_incarnation,
)
from phalanx.security.crypto.pki import (
    LOCAL_HOSTS,
    create_authority,
    issue,
    load_authority,
    load_identity,
    sign_request,
)
from phalanx.security.crypto.request import make_request, read_request
from phalanx.security.crypto.revocation import Revocation, RevokedParties
from phalanx.security.crypto.signer import load_signer, make_signer, read_public_signer

__all__ = [
    "DIGEST_PATTERN",
    "LOCAL_HOSTS",
    "SESSION_NAME",
    "Identity",
    "MonotonicCounter",
    "NotRollbackProofCounter",
    "Peer",
    "Revocation",
    "RevokedParties",
    "boot_name",
    "certificate_facts",
    "certified_name",
    "check_party_name",
    "check_session_name",
    "create_authority",
    "digest_hex",
    "fingerprint",
    "in_domain",
    "incarnation_of",
    "issue",
    "load_authority",
    "load_identity",
    "load_signer",
    "lock_file",
    "make_private_directory",
    "make_request",
    "make_signer",
    "name_of_incarnation",
    "parse_canonical",
    "peer_from_certificate",
    "read_number",
    "read_private",
    "read_public",
    "read_public_signer",
    "read_request",
    "sign_request",
    "steady_now",
    "tls_server_name",
    "write_number",
    "write_private",
    "write_public",
]
