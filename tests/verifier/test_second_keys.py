"""Passports of an owner with two keys: whoever has broken Ed25519 and ECDSA, and not ML-DSA-44, forges nothing of it.

The forger of these tests holds every Ed25519 and ECDSA key, of the owner and of the authority, as one with a quantum
computer would. Against an owner with one key the same forger wins.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.mldsa import MLDSA44PrivateKey

from phalanx.governance.passport import hash_members, write_bundle
from phalanx.governance.statements import ReleaseSigner
from phalanx.security.crypto import Identity, create_authority, issue_certificate, load_identity
from phalanx.verifier.bundle import SEAL, read_bundle
from phalanx.verifier.forms import RefusedError, canonical, digest, in_domain, sha256
from phalanx.verifier.passport import verify_passport

_AUTHORITY_KEY = "authority-ml-dsa-44.key"
MANIFEST = "checkpoints/step-00000002.json"


def make_owner(home: Path, *, num_keys: int = 2) -> Identity:
    create_authority(home)
    if num_keys == 1:
        (home / _AUTHORITY_KEY).unlink()
    issue_certificate(home, "owner")
    return load_identity(home / "owner")


@pytest.fixture
def owner(tmp_path: Path) -> Identity:
    return make_owner(tmp_path / "pki")


def with_classical_keys(owner: Identity) -> Identity:
    """The forger: it has no second key, and makes the signatures that it can make."""
    return replace(owner, ml_dsa_key=None)


def with_own_second_key(owner: Identity) -> Identity:
    return replace(owner, ml_dsa_key=MLDSA44PrivateKey.generate())


def make_manifest(signer: Identity, step: int = 2) -> bytes:
    body = {"run": "first", "step": step}
    fields = signer.signature_fields(in_domain("checkpoint-manifest/1", canonical(body)))
    return canonical({"body": body, "signer": signer.fingerprint, **fields})


def make_log(owner: Identity, manifest: bytes, weights: str = "0" * 64) -> list[bytes]:
    """Return the lines of a run without a guard, which need no worker's signatures."""
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("run_started", {"step": 0, "steps": 2}),
        ("checkpoint_saved", {"step": 2, "manifest": sha256(manifest), "kept": [2]}),
        ("run_completed", {"final_weights_digest": weights}),
    ]
    rows: list[bytes] = []
    previous = digest(in_domain("log-start/1", b"first"))
    for number, (kind, body) in enumerate(bodies):
        line = {"sequence": number, "time": "2026-11-29T12:00:00+00:00", "run": "first", "kind": kind, "body": body}
        line["previous"] = previous
        signature = owner.sign_data(in_domain("log/1", canonical(line))).hex()
        rows.append(canonical({**line, "signature": signature}))
        previous = digest(rows[-1])
    return rows


def write_passport(
    path: Path,
    signer: Identity,
    *,
    owner: Identity | None = None,
    manifest: bytes | None = None,
    weights: str = "0" * 64,
) -> Path:
    """Write the passport of a run without model and data.

    Args:
        signer: Seals it.
        owner: The owner whose certificates are in it; the signer when left out.
    """
    owner, manifest = owner or signer, manifest or make_manifest(signer)
    rows = make_log(signer, manifest, weights)
    members = {
        "certificates/owner.pem": owner.certificate_pem,
        "certificates/authority.pem": owner.authority_pem,
        "log/events.jsonl": b"".join(row + b"\n" for row in rows),
        MANIFEST: manifest,
    }
    facts = {
        **dict.fromkeys(("dataset", "model", "software", "time")),
        **{"corpora": [], "draws": [], "verdicts": [], "run": "first", "status": "completed", "weights": weights},
        "audits": {"proven": 0, "recorded": 0, "signed": 0},
        "log": {"num_events": len(rows), "digest": digest(rows[-1])},
    }
    write_bundle(path, members, ReleaseSigner(signer).seal_members(hash_members(members), facts))
    return path


def sign_head(signer: Identity, last: bytes) -> bytes:
    statement = {"run": "first", "num_events": 3, "digest": digest(last)}
    return canonical({**statement, **signer.signature_fields(in_domain("log-head/1", canonical(statement)))})


def test_a_passport_of_an_owner_with_two_keys_is_signed_by_both_and_holds(owner: Identity, tmp_path: Path) -> None:
    path = write_passport(tmp_path / "passport", owner)

    findings = verify_passport(path, owner.fingerprint, owner.certificate_pem.decode())

    assert findings.owner == owner.fingerprint
    seal = read_bundle(path)[SEAL].read_all()
    assert seal.count(b'"keyid"') == 2
    assert sha256(owner.public.ml_dsa_key).encode() in seal


@pytest.mark.parametrize("forge", [with_classical_keys, with_own_second_key])
def test_a_forger_without_the_second_key_writes_no_other_passport(
    owner: Identity, tmp_path: Path, forge: Callable[[Identity], Identity]
) -> None:
    forged = write_passport(tmp_path / "forged", forge(owner), weights="1" * 64)

    with pytest.raises(RefusedError, match=SEAL):
        verify_passport(forged, owner.fingerprint)


def test_the_same_forger_wins_against_an_owner_with_one_key(tmp_path: Path) -> None:
    owner = make_owner(tmp_path / "pki", num_keys=1)

    forged = write_passport(tmp_path / "forged", with_classical_keys(owner), weights="1" * 64)

    found = verify_passport(forged, owner.fingerprint, owner.certificate_pem.decode())
    assert found.facts["weights"] == "1" * 64


def test_a_second_key_that_the_authority_did_not_sign_for_is_refused(owner: Identity, tmp_path: Path) -> None:
    home = tmp_path / "pki"
    (home / "owner").rename(home / "before")
    (home / _AUTHORITY_KEY).write_text(MLDSA44PrivateKey.generate().private_bytes_raw().hex() + "\n")
    issue_certificate(home, "owner")
    # the authority's certificate, which people keep, is the old one
    other = replace(load_classical(home / "owner", owner), authority_pem=owner.authority_pem)
    forged = write_passport(tmp_path / "forged", other)

    with pytest.raises(RefusedError, match=r"certificates/owner\.pem"):
        verify_passport(forged)


def load_classical(home: Path, owner: Identity) -> Identity:
    """The owner's keys under the certificate of a directory."""
    return replace(owner, certificate_pem=(home / "certificate.pem").read_bytes())


def test_a_certificate_without_the_second_key_is_not_the_one_that_a_reader_keeps(
    owner: Identity, tmp_path: Path
) -> None:
    """The fingerprint names the first key alone: against this forger a reader keeps the certificate."""
    single = make_owner(tmp_path / "stripped", num_keys=1)
    stripped = replace(single, signing_key=owner.signing_key, name="owner")
    forged = write_passport(tmp_path / "forged", with_classical_keys(owner), owner=stripped)

    with pytest.raises(RefusedError, match=r"certificates/owner\.pem|certificate is another one"):
        verify_passport(forged, certificate_pem=owner.certificate_pem.decode())


@pytest.mark.parametrize("forge", [with_classical_keys, with_own_second_key])
def test_a_manifest_and_a_head_without_the_second_signature_are_refused(
    owner: Identity, tmp_path: Path, forge: Callable[[Identity], Identity]
) -> None:
    by_forger = write_passport(tmp_path / "forged", owner, manifest=make_manifest(forge(owner)))
    with pytest.raises(RefusedError, match=MANIFEST):
        verify_passport(by_forger)

    path = write_passport(tmp_path / "passport", owner)
    last = read_bundle(path)["log/events.jsonl"].read_all().splitlines()[-1]
    assert verify_passport(path, heads=[sign_head(owner, last)]).rows["heads that others kept"].startswith("1")
    with pytest.raises(RefusedError, match="head"):
        verify_passport(path, heads=[sign_head(forge(owner), last)])


def test_every_flipped_byte_of_both_signatures_is_refused(owner: Identity, tmp_path: Path) -> None:
    path = write_passport(tmp_path / "passport", owner)
    seal = read_bundle(path)[SEAL]
    text = seal.read_all()
    data = bytearray(path.read_bytes())
    begin = seal.start + text.index(b'"signatures"')

    for place in range(begin, seal.start + seal.size):
        data[place] ^= 1
        path.write_bytes(data)
        with pytest.raises(RefusedError):
            verify_passport(path)
        data[place] ^= 1
