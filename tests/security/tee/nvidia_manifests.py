"""A test's own signer of NVIDIA's manifests."""

import base64
import hashlib
from dataclasses import dataclass, field

from authority import NOW, Form, issue, p384
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from nvidia import BLOCKS

from phalanx.security.tee.formats.chain import Trust
from phalanx.security.tee.formats.xml_signature import CANONICAL, DSIG, ECDSA_SHA384, ENVELOPED, SHA384
from phalanx.security.tee.formats.xml_tree import canonical_xml, parse_xml

SWID = "http://standards.iso.org/iso/19770/-2/2015/schema.xsd"
HASH = "http://www.w3.org/2001/04/xmlenc#sha384"
DRIVER, FIRMWARE = "575.01.02", "96.00.9F.00.01"


def resource(index: int, *values: str, active: str = "True") -> str:
    given = " ".join(f'h:Hash{number}="{value}"' for number, value in enumerate(values))
    return f'<n:Resource type="Measurement" index="{index}" active="{active}" alternatives="{len(values)}" {given}/>'


def measured(*blocks: int) -> str:
    """Measurements as the test's GPU has them; a manifest counts from 0, SPDM from 1."""
    return "\n".join(resource(block - 1, BLOCKS[block].hex()) for block in blocks)


def document(version: str, resources: str, end: str = "@SIGNATURE@</SoftwareIdentity>\n") -> str:
    return (
        f'<SoftwareIdentity xmlns="{SWID}" xmlns:n="{SWID}" xmlns:h="{HASH}" name="GB100" version="1.0">\n'
        f'  <n:Entity name="Test" role="tagCreator"/>\n  <n:Meta product="GB100" colloquialVersion="{version}"/>\n'
        f"  <n:Payload>\n{resources}\n  </n:Payload>\n{end}"
    )


SIGNED_INFO = (
    '<ds:SignedInfo><ds:CanonicalizationMethod Algorithm="@FORM@"/><ds:SignatureMethod Algorithm="@METHOD@"/>'
    '<ds:Reference URI="@URI@"><ds:Transforms><ds:Transform Algorithm="@ENVELOPED@"/>'
    '<ds:Transform Algorithm="@FORM@"/></ds:Transforms><ds:DigestMethod Algorithm="@HASH@"/>'
    "<ds:DigestValue>@DIGEST@</ds:DigestValue></ds:Reference></ds:SignedInfo>"
)


@dataclass
class Signer:
    """A root for manifests and the signer below it."""

    leaf_form: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.root = issue("Test CoRIM signing Root CA", p384())
        self.leaf = issue("Test RIM Signer", p384(), self.root, Form(**self.leaf_form))

    @property
    def trust(self) -> Trust:
        return Trust((self.root.parsed,), NOW)

    def sign(self, text: str, signer=None, **changes: str) -> bytes:
        """Sign a document over its canonical form without the signature."""
        leaf = signer or self.leaf
        plain = parse_xml(text.replace("@SIGNATURE@", "").encode(), "test")
        settings = {
            "FORM": CANONICAL[0],
            "METHOD": ECDSA_SHA384,
            "URI": "",
            "ENVELOPED": ENVELOPED,
            "HASH": SHA384,
            "DIGEST": base64.b64encode(hashlib.sha384(canonical_xml(plain)).digest()).decode(),
            **changes,
        }
        info = SIGNED_INFO
        for name, value in settings.items():
            info = info.replace(f"@{name}@", value)
        certificates = "".join(
            f"<ds:X509Certificate>\n{base64.encodebytes(one.der).decode()}</ds:X509Certificate>"
            for one in (leaf, self.root)
        )

        def signature(value: str) -> str:
            return (
                f'<ds:Signature xmlns:ds="{DSIG}">{info}<ds:SignatureValue>{value}</ds:SignatureValue>'
                f"<ds:KeyInfo><ds:X509Data>{certificates}</ds:X509Data></ds:KeyInfo></ds:Signature>"
            )

        drafted = parse_xml(text.replace("@SIGNATURE@", signature("")).encode(), "test")
        signed = canonical_xml(drafted.child_elements[-1].child_elements[0])
        r, s = decode_dss_signature(leaf.key.sign(signed, ec.ECDSA(hashes.SHA384())))
        value = base64.b64encode(r.to_bytes(48, "big") + s.to_bytes(48, "big")).decode()
        return text.replace("@SIGNATURE@", signature(value)).encode()

    def pair(self, driver: str | None = None, firmware: str | None = None) -> dict[str, bytes]:
        """Endorsements of a GPU: by default those that the test's GPU satisfies."""
        return {
            "driver_rim": self.sign(driver or document(DRIVER, measured(1, 2))),
            "vbios_rim": self.sign(firmware or document(FIRMWARE, measured(3, 4))),
        }
