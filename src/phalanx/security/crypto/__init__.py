"""Digests, identities, certificates and counters: the only place that touches keys."""

from phalanx.security.crypto.canonical import (
    DIGEST_PATTERN as DIGEST_PATTERN,
    digest_hex as digest_hex,
    in_domain as in_domain,
    parse_canonical as parse_canonical,
)
from phalanx.security.crypto.certificate import (
    certificate_facts as certificate_facts,
    certificate_fingerprint as certificate_fingerprint,
    peer_from_certificate as peer_from_certificate,
    tls_server_name as tls_server_name,
)
from phalanx.security.crypto.clock import boot_name as boot_name, steady_now as steady_now
from phalanx.security.crypto.counter import (
    MonotonicCounter as MonotonicCounter,
    NotRollbackProofCounter as NotRollbackProofCounter,
    lock_file as lock_file,
    read_number as read_number,
    replace_file as replace_file,
    write_number as write_number,
)
from phalanx.security.crypto.files import (
    make_private_directory as make_private_directory,
    read_private as read_private,
    read_public as read_public,
    write_private as write_private,
    write_public as write_public,
)
from phalanx.security.crypto.identity import (
    SESSION_NAME as SESSION_NAME,
    Identity as Identity,
    Peer as Peer,
    certified_name as certified_name,
    check_party_name as check_party_name,
    check_session_name as check_session_name,
    incarnation_of as incarnation_of,
    name_of_incarnation as name_of_incarnation,
)
from phalanx.security.crypto.pki import (
    LOCAL_HOSTS as LOCAL_HOSTS,
    create_authority as create_authority,
    issue_certificate as issue_certificate,
    load_authority as load_authority,
    load_identity as load_identity,
    sign_request as sign_request,
)
from phalanx.security.crypto.request import make_request as make_request, read_request as read_request
from phalanx.security.crypto.seal_key import (
    SEAL_PUBLIC_BYTES as SEAL_PUBLIC_BYTES,
    HybridSealKey as HybridSealKey,
    seal_for as seal_for,
)
from phalanx.security.crypto.revocation import Revocation as Revocation, RevokedParties as RevokedParties
from phalanx.security.crypto.identity import (
    load_signer as load_signer,
    make_signer as make_signer,
    read_public_signer as read_public_signer,
    verify_by_fingerprint as verify_by_fingerprint,
)
