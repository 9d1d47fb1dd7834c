"""One form of XML signature: over the whole document that it lies in, with ECDSA over P-384.

Source: W3C, XML Signature Syntax and Processing 1.1; RFC 9231 (identifiers).
"""

import base64
import binascii
import hashlib
import hmac

from cryptography.hazmat.primitives.asymmetric import ec

from phalanx.errors import RefusedEvidenceError
from phalanx.security.tee.formats.chain import Trust, check_chain, check_signs_data
from phalanx.security.tee.formats.reader import malformed_error
from phalanx.security.tee.formats.signature import check_raw_ecdsa
from phalanx.security.tee.formats.x509 import Certificate, parse_certificate
from phalanx.security.tee.formats.xml_tree import XmlElement, canonical_xml
from phalanx.security.tee.refusal_reason import RefusedEvidenceReason

DSIG = "http://www.w3.org/2000/09/xmldsig#"
CANONICAL = ("http://www.w3.org/2006/12/xml-c14n11", "http://www.w3.org/TR/2001/REC-xml-c14n-20010315")
ENVELOPED = f"{DSIG}enveloped-signature"
ECDSA_SHA384 = "http://www.w3.org/2001/04/xmldsig-more#ecdsa-sha384"
SHA384 = "http://www.w3.org/2001/04/xmldsig-more#sha384"
_SIGNATURE_BYTES, _MAX_CERTIFICATES = 96, 8


def check_signed_document(root: XmlElement, trust: Trust, where: str) -> tuple[Certificate, ...]:
    """Check that a document was signed as a whole, by a certificate below a pinned root.

    Args:
        root: The document; its signature is the last child.

    Returns:
        The signer's path, leaf first.
    """
    signatures = [element for element in root.child_elements if element.expanded_name == (DSIG, "Signature")]
    if len(signatures) != 1 or root.child_elements[-1] is not signatures[0]:
        raise malformed_error(where, f"{len(signatures)} signatures, expected one at its end")
    signature = signatures[0]
    info, value, key_info = _check_children(signature, ("SignedInfo", "SignatureValue", "KeyInfo"), where)
    digest = _digest_of_document(info, where)
    if not hmac.compare_digest(hashlib.sha384(canonical_xml(root, without=signature)).digest(), digest):
        raise RefusedEvidenceError(
            RefusedEvidenceReason.BAD_SIGNATURE, f"{where}: its digest is another one; it was altered"
        )
    certificates = _read_certificates(key_info, where)
    path = check_chain(certificates[0], certificates[1:], trust)
    check_signs_data(certificates[0])
    raw = _decode_base64(value, where)
    if len(raw) != _SIGNATURE_BYTES:
        raise malformed_error(where, f"a signature of {len(raw)} bytes, expected {_SIGNATURE_BYTES}")
    check_raw_ecdsa(certificates[0].public_key, ec.SECP384R1, raw, canonical_xml(info), where)
    return path


def _digest_of_document(info: XmlElement, where: str) -> bytes:
    method, signed_with, reference = _check_children(
        info, ("CanonicalizationMethod", "SignatureMethod", "Reference"), where
    )
    transforms, hashed_with, value = _check_children(reference, ("Transforms", "DigestMethod", "DigestValue"), where)
    enveloped, form = _check_children(transforms, ("Transform", "Transform"), where)
    if reference.attributes != {"URI": ""}:
        raise malformed_error(where, "is not signed as a whole")
    for element, allowed in (
        (method, CANONICAL),
        (signed_with, (ECDSA_SHA384,)),
        (hashed_with, (SHA384,)),
        (enveloped, (ENVELOPED,)),
        (form, CANONICAL),
    ):
        algorithm = element.attributes.get("Algorithm", "")
        if set(element.attributes) != {"Algorithm"} or element.children or algorithm not in allowed:
            raise malformed_error(where, f"{element.tag[:40]} {algorithm[:80]!r}, expected {allowed[0]}")
    return _decode_base64(value, where)


def _read_certificates(key_info: XmlElement, where: str) -> tuple[Certificate, ...]:
    (data,) = _check_children(key_info, ("X509Data",), where)
    certificates = data.child_elements
    if not 1 <= len(certificates) <= _MAX_CERTIFICATES or {
        certificate.expanded_name for certificate in certificates
    } != {(DSIG, "X509Certificate")}:
        raise malformed_error(where, f"expected 1 to {_MAX_CERTIFICATES} certificates and nothing else")
    return tuple(
        parse_certificate(_decode_base64(certificate, where), f"certificate of {where}") for certificate in certificates
    )


def _check_children(element: XmlElement, names: tuple[str, ...], where: str) -> list[XmlElement]:
    """Return the children of an element, which are exactly these, with nothing but space between."""
    if [child.expanded_name for child in element.child_elements] != [
        (DSIG, name) for name in names
    ] or element.text_content.strip():
        raise malformed_error(where, f"{element.tag[:40]} must hold {', '.join(names)} and nothing else")
    return element.child_elements


def _decode_base64(element: XmlElement, where: str) -> bytes:
    text = "".join(element.text_content.split())
    if element.child_elements:
        raise malformed_error(where, f"{element.tag[:40]} holds elements, expected base64")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as exc:
        raise malformed_error(where, f"{element.tag[:40]} is not base64") from exc
