"""Receipts of RFC 9942: the place of a line in the witnessed log, in COSE, for readers that know no note of C2SP.

Source: RFC 9942, sections 4 and 5 (RFC9162_SHA256, detached payload); RFC 9053 for ES256; RFC 9964 for ML-DSA-44.
"""

import hashlib
from collections.abc import Callable, Mapping

from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from phalanx.errors import AuditLogError
from phalanx.governance.statements import ReleaseSigner
from phalanx.security.crypto import Identity
from phalanx.security.tee.formats.cbor import encode_cbor, tag_sign1
from phalanx.security.tee.formats.cose import ALGORITHM, to_be_signed
from phalanx.security.witness import CheckpointSigner, LineProof

ES256, ML_DSA_44 = -7, -48
_KEY_ID, _CLAIMS, _STRUCTURE, _PROOFS = 4, 15, 395, 396
_ISSUER, _SUBJECT = 1, 2
_RFC9162_SHA256, _INCLUSION = 1, -1


def make_receipts(proof: LineProof, owner: Identity, signer: CheckpointSigner) -> Mapping[str, bytes]:
    """Sign the root that a line is under, once by the owner's ECDSA P-256 key and once by its ML-DSA-44 key.

    Args:
        proof: The line's place under a published head.
        signer: The keys that sign heads of this log.

    Returns:
        A COSE_Sign1 by the name of its algorithm. Its reader computes the root from the entry, which is the BLAKE3
        digest of the line, and from the path inside; the signature is over that root.

    Raises:
        AuditLogError: The line is not under the head, or the log has not signed it: a receipt for a root that somebody
            else names would be a second history.
        CertificateError: The owner has no ECDSA key.
    """
    proof.check_place()
    if set(proof.signed.check_signatures(signer.keys)) != set(signer.keys):
        raise AuditLogError(f"the head of {proof.signed.checkpoint.origin!r} is not signed by all keys of this log")
    release = ReleaseSigner(owner)
    receipts = {"es256": _make_receipt(proof, ES256, _name_key(release.public_der), release.sign_cose)}
    if signer.ml_dsa_key is not None:
        public = signer.ml_dsa_key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        receipts["ml-dsa-44"] = _make_receipt(proof, ML_DSA_44, _name_key(public), signer.ml_dsa_key.sign)
    return receipts


def _make_receipt(proof: LineProof, algorithm: int, key_id: bytes, sign: Callable[[bytes], bytes]) -> bytes:
    checkpoint = proof.signed.checkpoint
    protected = encode_cbor(
        {
            ALGORITHM: algorithm,
            _KEY_ID: key_id,
            _CLAIMS: {_ISSUER: checkpoint.origin, _SUBJECT: f"line {proof.index + 1}"},
            _STRUCTURE: _RFC9162_SHA256,
        }
    )
    inclusion = encode_cbor([checkpoint.head.size, proof.index, list(proof.path)])
    signature = sign(to_be_signed(protected, checkpoint.head.root))
    return tag_sign1(encode_cbor([protected, {_PROOFS: {_INCLUSION: [inclusion]}}, None, signature]))


def _name_key(public_der: bytes) -> bytes:
    return hashlib.sha256(public_der).digest()
