"""A test's own AWS: a root, a short chain and documents."""

from dataclasses import dataclass, field

from authority import NOW, Form, issue, p384
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from published import Case

from phalanx.security.tee import Binding, Evidence, Policy
from phalanx.security.tee.aws.nitro import NitroReference
from phalanx.security.tee.formats.cbor import encode_cbor
from phalanx.security.tee.formats.cose import to_be_signed

PCR0 = b"\x21" * 48


@dataclass
class Aws:
    """A root, a region and an enclave's certificate."""

    leaf_form: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.root = issue("aws.nitro-enclaves", p384())
        self.region = issue("us-test-1.aws.nitro-enclaves", p384(), self.root, Form(is_authority=True, path_length=0))
        self.leaf = issue("i-0-enc1.us-test-1.aws", p384(), self.region, Form(**self.leaf_form))

    def document(self, binding: Binding, **changes) -> dict:
        return {
            "module_id": "i-0-enc1",
            "digest": "SHA384",
            "timestamp": int(NOW.timestamp() * 1000),
            "pcrs": {0: PCR0, 1: b"\x22" * 48, 2: b"\x23" * 48},
            "certificate": self.leaf.der,
            "cabundle": [self.root.der, self.region.der],
            "public_key": None,
            "user_data": binding.binding_digest(),
            "nonce": binding.nonce,
            **changes,
        }

    def sign(self, document: dict, algorithm: int = -35) -> bytes:
        protected, payload = encode_cbor({1: algorithm}), encode_cbor(document)
        r, s = decode_dss_signature(self.leaf.key.sign(to_be_signed(protected, payload), ec.ECDSA(hashes.SHA384())))
        return encode_cbor([protected, {}, payload, r.to_bytes(48, "big") + s.to_bytes(48, "big")])

    def case(self, binding: Binding, **changes) -> Case:
        evidence = Evidence("nitro", self.sign(self.document(binding, **changes)), {}, binding)
        reference = NitroReference(measurements={"pcr0": (PCR0.hex(),)})
        return Case(evidence, Policy({"nitro": reference}, {"nitro": (self.root.parsed,)}), binding, NOW)
