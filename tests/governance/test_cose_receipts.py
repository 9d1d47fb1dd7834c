"""Receipts of RFC 9942: read by another CBOR library, verified by keys alone, and refused with any byte changed."""

import hashlib
import io
import json
from pathlib import Path

import cbor2
import pytest
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.mldsa import MLDSA44PublicKey
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature

from phalanx.errors import AuditLogError
from phalanx.governance.receipts import make_receipts
from phalanx.security.audit import AuditLog
from phalanx.security.crypto import create_authority, issue_certificate, load_identity
from phalanx.security.witness import (
    HistoryCopy,
    LineProof,
    SignedCheckpoint,
    log_signer,
)
from phalanx.security.witness.notes import LogCheckpoint

RUN = "0123456789abcdef0123456789abcdef"
ORIGIN = f"phalanx/{RUN}"


class Company:
    """A log of `size` lines, its keys, and what a stranger has of them."""

    def __init__(self, home: Path, size: int) -> None:
        create_authority(home / "keys")
        issue_certificate(home / "keys", "owner")
        self.owner = load_identity(home / "keys" / "owner")
        with AuditLog(home / "events.jsonl", self.owner, RUN) as log:
            for number in range(size):
                log.append_event("note", {"text": f"line {number}"})
        self.lines = (home / "events.jsonl").read_bytes().splitlines()
        self.history = HistoryCopy.from_events(home / "events.jsonl", self.owner.public, RUN)
        self.signer = log_signer(self.owner, ORIGIN, home / "keys" / "owner")
        certificate = x509.load_pem_x509_certificate(self.owner.certificate_pem)
        self.public_keys = {
            "es256": certificate.public_key(),
            "ml-dsa-44": self.signer.ml_dsa_key.public_key(),
        }

    def prove_line(self, index: int) -> LineProof:
        size = len(self.lines)
        checkpoint = LogCheckpoint(ORIGIN, self.history.tree.head_at(size))
        signed = SignedCheckpoint(checkpoint, tuple(self.signer.sign_checkpoint(checkpoint, 1)))
        return LineProof.from_history(self.history, signed, index, self.lines[index])


@pytest.fixture(scope="module", params=[1, 7], ids=["one line", "seven lines"])
def company(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Company:
    return Company(tmp_path_factory.mktemp("company"), request.param)


def verify_receipt(receipt: bytes, entry: bytes, key: ec.EllipticCurvePublicKey | MLDSA44PublicKey) -> int:
    """Verify as RFC 9942 says, by cbor2 and cryptography alone; return the index of the entry.

    Raises whatever shows that it does not hold.
    """
    stream = io.BytesIO(receipt)
    message = cbor2.load(stream)
    assert stream.read() == b""
    assert message.tag == 18
    protected_bytes, unprotected, payload, signature = message.value
    protected = cbor2.loads(protected_bytes)
    assert payload is None
    assert protected[395] == 1
    (proof,) = unprotected[396][-1]
    size, index, path = cbor2.loads(proof)
    root = root_of(entry, index, size, path)
    signed = cbor2.dumps(["Signature1", protected_bytes, b"", root])
    if isinstance(key, MLDSA44PublicKey):
        assert protected[1] == -48
        key.verify(signature, signed)
    else:
        assert protected[1] == -7
        assert len(signature) == 64
        numbers = (int.from_bytes(signature[:32], "big"), int.from_bytes(signature[32:], "big"))
        key.verify(encode_dss_signature(*numbers), signed, ec.ECDSA(hashes.SHA256()))
    return index


def root_of(entry: bytes, index: int, size: int, path: list[bytes]) -> bytes:
    """RFC 6962, section 2.1, from the definition: the tree is cut at the largest power of two below its size."""
    if size == 1:
        assert not path
        assert index == 0
        return hashlib.sha256(b"\0" + entry).digest()
    split = 1 << ((size - 1).bit_length() - 1)
    if index < split:
        left, right = root_of(entry, index, split, path[:-1]), path[-1]
    else:
        left, right = path[-1], root_of(entry, index - split, size - split, path[:-1])
    return hashlib.sha256(b"\1" + left + right).digest()


def test_another_library_verifies_every_line_by_both_keys(company: Company) -> None:
    for index, entry in enumerate(company.history.entries):
        receipts = make_receipts(company.prove_line(index), company.owner, company.signer)

        assert set(receipts) == {"es256", "ml-dsa-44"}
        for name, receipt in receipts.items():
            assert verify_receipt(receipt, entry, company.public_keys[name]) == index


def test_its_header_names_log_line_and_key(company: Company) -> None:
    receipt = make_receipts(company.prove_line(0), company.owner, company.signer)["es256"]

    protected = cbor2.loads(cbor2.loads(receipt).value[0])

    assert protected[15] == {1: ORIGIN, 2: "line 1"}
    assert len(protected[4]) == 32


def test_every_changed_byte_is_refused(company: Company) -> None:
    """A byte inside of the path, of the header, of a signature, or of CBOR itself."""
    index = len(company.lines) - 1
    receipts = make_receipts(company.prove_line(index), company.owner, company.signer)
    for name, receipt in receipts.items():
        step = 1 if name == "es256" else 97
        for place in [*range(0, len(receipt), step), len(receipt) - 1]:
            changed = receipt[:place] + bytes([receipt[place] ^ 1]) + receipt[place + 1 :]
            with pytest.raises(_REFUSALS):
                verify_receipt(changed, company.history.entries[index], company.public_keys[name])


_REFUSALS = (
    *(InvalidSignature, AssertionError, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError),
    *(EOFError, cbor2.CBORDecodeError),
)


def test_a_receipt_of_one_line_or_log_is_none_of_another(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    one, two = Company(tmp_path / "one", 5), Company(tmp_path / "two", 5)
    receipts = make_receipts(one.prove_line(3), one.owner, one.signer)

    for name, receipt in receipts.items():
        with pytest.raises(InvalidSignature):
            verify_receipt(receipt, one.history.entries[2], one.public_keys[name])
        with pytest.raises(InvalidSignature):
            verify_receipt(receipt, one.history.entries[3], two.public_keys[name])


def test_a_head_that_the_log_has_not_signed_gets_no_receipt(tmp_path: Path) -> None:
    """Whoever can write the published directory could have a second history signed in COSE."""
    (tmp_path / "one").mkdir()
    (tmp_path / "lie").mkdir()
    one, lie = Company(tmp_path / "one", 5), Company(tmp_path / "lie", 4)
    foreign = lie.prove_line(3)
    unsigned = LineProof(foreign.line, foreign.index, foreign.path, SignedCheckpoint(foreign.signed.checkpoint, ()))

    for proof in (foreign, unsigned):
        with pytest.raises(AuditLogError, match="is not signed by all keys of this log"):
            make_receipts(proof, one.owner, one.signer)
    # without the comparison the attacker has won: the same root under the right keys
    with_own_signature = LineProof(
        *(foreign.line, foreign.index, foreign.path),
        SignedCheckpoint(foreign.signed.checkpoint, tuple(one.signer.sign_checkpoint(foreign.signed.checkpoint, 1))),
    )
    won = make_receipts(with_own_signature, one.owner, one.signer)["es256"]
    assert verify_receipt(won, lie.history.entries[3], one.public_keys["es256"]) == 3


def test_the_command_writes_receipts_beside_the_proof(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from phalanx.cli import run_command

    run = tmp_path / "run"
    run.mkdir()
    company = Company(tmp_path, 4)
    (run / "run.json").write_text(json.dumps({"run": RUN}))
    (run / "pki").symlink_to(tmp_path / "keys")
    (run / "events.jsonl").symlink_to(tmp_path / "events.jsonl")
    keys = [key.to_text() for key in company.signer.keys]
    (tmp_path / "policy").write_text("".join(f"log {key}\n" for key in keys) + "quorum none\n")
    public = tmp_path / "public"
    assert run_command(["witness", "publish", str(run), "--policy", str(tmp_path / "policy"), "--to", str(public)]) == 0

    words = ["witness", "prove", str(run), "--from", str(public), "--line", "3", "--out", str(tmp_path / "three")]
    assert run_command([*words, "--receipts"]) == 0

    for name, key in company.public_keys.items():
        assert verify_receipt((tmp_path / f"three.{name}").read_bytes(), company.history.entries[2], key) == 2
    (public / "checkpoint").write_bytes((public / "checkpoint").read_bytes().replace(b"phalanx/", b"phalanx/x", 1))
    assert run_command([*words, "--receipts"]) == 5
