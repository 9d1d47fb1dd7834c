"""Chains from a signer's certificate up to a pinned root: names, signatures, dates, usage and revocation."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from phalanx.errors import RefusedEvidenceError
from phalanx.security.tee.formats.signature import check_x509_signature
from phalanx.security.tee.formats.x509 import Certificate, RevocationList, key_usage, read_basic_constraints
from phalanx.security.tee.refusal_reason import RefusedEvidenceReason

_UNDERSTOOD = {"2.5.29.15", "2.5.29.17", "2.5.29.19", "2.5.29.37"}
_SIGNS_CERTIFICATES, _SIGNS_LISTS, _SIGNS_DATA = 0x04, 0x02, 0x80
MAX_DEPTH = 8


@dataclass(frozen=True)
class Trust:
    """The roots, the clock and the revocations against which chains are checked.

    Attributes:
        roots: The pinned roots of one vendor.
        crls: Revocation lists; each is checked against the authority that issued it.
        revoked: SHA-256 fingerprints of certificates that the policy does not accept.
        require_crl: Whether every certificate below a root must be covered by a list.
        manifest_roots: Pinned roots of the authorities that sign reference values; none where the vendor signs none.
    """

    roots: tuple[Certificate, ...]
    now: datetime
    crls: tuple[RevocationList, ...] = ()
    revoked: frozenset[str] = frozenset()
    require_crl: bool = False
    manifest_roots: tuple[Certificate, ...] = ()


def check_chain(leaf: Certificate, others: Iterable[Certificate], trust: Trust) -> tuple[Certificate, ...]:
    """Return the path from a certificate to a pinned root.

    Args:
        others: Certificates that came along, in any order; each must be on the path, or one of the pinned roots.

    Returns:
        Leaf first, root last.

    Raises:
        RefusedEvidenceError: No path, a signature that does not match, a date, a usage, a revocation, or a
            certificate that nothing rests on: an altered copy would make two envelopes of one evidence.
    """
    pool = tuple(others)
    path = [leaf]
    while not _is_root(path[-1], trust):
        if len(path) >= MAX_DEPTH:
            raise RefusedEvidenceError(
                RefusedEvidenceReason.BAD_CHAIN, f"chain of {leaf.subject_name!r} is longer than {MAX_DEPTH}"
            )
        path.append(_find_issuer(path[-1], (*trust.roots, *pool)))
    for index, (certificate, issuer) in enumerate(itertools.pairwise(path)):
        _check_issuer(certificate, issuer, below=index)
    for certificate in path:
        _check_dates(certificate, trust.now)
        _check_critical(certificate)
        if certificate.sha256_hex in trust.revoked:
            raise RefusedEvidenceError(
                RefusedEvidenceReason.REVOKED, f"certificate {certificate.subject_name!r} is revoked by the policy"
            )
    for certificate, issuer in itertools.pairwise(path):
        _check_revocation(certificate, issuer, trust)
    used = {certificate.raw for certificate in (*path, *trust.roots)}
    for candidate in pool:
        if candidate.raw not in used:
            raise RefusedEvidenceError(
                RefusedEvidenceReason.BAD_CHAIN,
                f"certificate {candidate.subject_name!r} was sent along and is neither on the path nor a pinned root",
            )
    return tuple(path)


def check_signs_data(leaf: Certificate) -> None:
    """Check that a certificate's key may sign data."""
    usage = key_usage(leaf)
    if read_basic_constraints(leaf)[0] or (usage is not None and not usage & _SIGNS_DATA):
        raise RefusedEvidenceError(
            RefusedEvidenceReason.BAD_CHAIN, f"certificate {leaf.subject_name!r} is not one that signs data"
        )


def first_end(path: Iterable[Certificate]) -> datetime:
    """Return the moment at which the first certificate of a path expires."""
    return min(certificate.not_after for certificate in path)


def _is_root(certificate: Certificate, trust: Trust) -> bool:
    return any(certificate.raw == root.raw for root in trust.roots)


def _find_issuer(certificate: Certificate, candidates: tuple[Certificate, ...]) -> Certificate:
    named = [
        candidate
        for candidate in candidates
        if candidate.subject == certificate.issuer and candidate.raw != certificate.raw
    ]
    if not named:
        raise RefusedEvidenceError(
            RefusedEvidenceReason.BAD_CHAIN,
            f"issuer of certificate {certificate.subject_name!r} is neither a pinned root nor sent along",
        )
    for index, candidate in enumerate(named):
        try:
            _check_signature(certificate, candidate)
        except RefusedEvidenceError:
            if index == len(named) - 1:
                raise
        else:
            return candidate
    return named[-1]


def _check_signature(certificate: Certificate, issuer: Certificate) -> None:
    try:
        check_x509_signature(
            issuer.spki,
            certificate.algorithm,
            certificate.signature,
            certificate.signed,
            f"certificate {certificate.subject_name!r}",
        )
    except RefusedEvidenceError as exc:
        raise RefusedEvidenceError(RefusedEvidenceReason.BAD_CHAIN, exc.detail) from exc


def _check_issuer(certificate: Certificate, issuer: Certificate, below: int) -> None:
    is_authority, length = read_basic_constraints(issuer)
    usage = key_usage(issuer)
    if not is_authority or (usage is not None and not usage & _SIGNS_CERTIFICATES):
        raise RefusedEvidenceError(
            RefusedEvidenceReason.BAD_CHAIN,
            f"certificate {certificate.subject_name!r} was issued by {issuer.subject_name!r}, who may not",
        )
    if length is not None and below > length:
        raise RefusedEvidenceError(
            RefusedEvidenceReason.BAD_CHAIN, f"too many authorities below {issuer.subject_name!r}"
        )


def _check_dates(certificate: Certificate, now: datetime) -> None:
    if now < certificate.not_before:
        start = certificate.not_before.isoformat()
        raise RefusedEvidenceError(
            RefusedEvidenceReason.NOT_YET_VALID,
            f"certificate {certificate.subject_name!r} begins at {start}, the clock says {now}",
        )
    if now > certificate.not_after:
        ended = certificate.not_after.isoformat()
        raise RefusedEvidenceError(
            RefusedEvidenceReason.EXPIRED,
            f"certificate {certificate.subject_name!r} ended at {ended}, the clock says {now}",
        )


def _check_critical(certificate: Certificate) -> None:
    for oid, (critical, _) in certificate.extensions.items():
        if critical and oid not in _UNDERSTOOD:
            raise RefusedEvidenceError(
                RefusedEvidenceReason.BAD_CHAIN,
                f"certificate {certificate.subject_name!r}: critical extension {oid} is not understood",
            )


def _check_revocation(certificate: Certificate, issuer: Certificate, trust: Trust) -> None:
    lists = [crl for crl in trust.crls if crl.issuer == issuer.subject]
    if not lists and trust.require_crl:
        raise RefusedEvidenceError(
            RefusedEvidenceReason.MISSING_ENDORSEMENT,
            f"no revocation list of {issuer.subject_name!r}, who issued {certificate.subject_name!r}",
        )
    for crl in lists:
        check_crl(crl, issuer, trust.now)
        if certificate.serial in crl.serials:
            raise RefusedEvidenceError(
                RefusedEvidenceReason.REVOKED,
                f"certificate {certificate.subject_name!r} is on the revocation list of {issuer.subject_name!r}",
            )


def check_crl(crl: RevocationList, issuer: Certificate, now: datetime) -> None:
    """Check that a revocation list is its issuer's and of today."""
    place = f"revocation list of {issuer.subject_name!r}"
    usage = key_usage(issuer)
    if usage is not None and not usage & _SIGNS_LISTS:
        raise RefusedEvidenceError(RefusedEvidenceReason.BAD_CHAIN, f"{place}: its issuer may not sign one")
    check_x509_signature(issuer.spki, crl.algorithm, crl.signature, crl.signed, place)
    if now < crl.this_update:
        raise RefusedEvidenceError(
            RefusedEvidenceReason.NOT_YET_VALID, f"{place}: issued at {crl.this_update}, the clock says {now}"
        )
    if now > crl.next_update:
        raise RefusedEvidenceError(
            RefusedEvidenceReason.EXPIRED, f"{place}: the next one was due at {crl.next_update}, the clock says {now}"
        )
