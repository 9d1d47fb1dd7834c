"""Statements about a trained model in the formats of others: OMS v1.0, SLSA provenance, in-toto test results."""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature

from phalanx.config import canonical_json
from phalanx.errors import CertificateError
from phalanx.security.crypto import Identity
from phalanx.verifier.passport import BUILD_TYPE, PASSPORT_PREDICATE, judge_tests
from phalanx.verifier.statement import (
    GIT_FILES,
    OMS_MEDIA_TYPE,
    OMS_PREDICATE,
    PAYLOAD_TYPE,
    SIGNATURE_FILE,
    SLSA_PREDICATE,
    STATEMENT_TYPE,
    TEST_PREDICATE,
    hash_file,
    signed_bytes,
)

Subject = dict[str, Any]


@dataclass(frozen=True)
class ModelFiles:
    """The files of a model directory.

    Attributes:
        name: Name of the model in statements.
        root: SHA-256 over the digests of all files, in the order of their paths.
        digests: SHA-256 of each file, by its path.
    """

    name: str
    root: str
    digests: Mapping[str, str]

    @classmethod
    def from_directory(cls, directory: Path, name: str) -> "ModelFiles":
        """Hash the files of a directory; a signature and git's files are left out, as OMS does."""
        ignored = {*GIT_FILES, SIGNATURE_FILE}
        paths = sorted(
            path.relative_to(directory).as_posix()
            for path in directory.rglob("*")
            if path.is_file() and path.relative_to(directory).parts[0] not in ignored
        )
        digests = {path: hash_file(directory / path) for path in paths}
        root = hashlib.sha256(b"".join(bytes.fromhex(digest) for digest in digests.values())).hexdigest()
        return cls(name, root, digests)

    @property
    def subject(self) -> Subject:
        """The model as in-toto statements name it."""
        return {"name": self.name, "digest": {"sha256": self.root}}


class ReleaseSigner:
    """Signs for programs of others with the ECDSA P-256 key of the owner's certificate, and seals with its log keys.

    Raises:
        CertificateError: The identity has no such key.
    """

    def __init__(self, owner: Identity) -> None:
        self._owner = owner
        key = serialization.load_pem_private_key(owner.tls_key_pem, None) if owner.tls_key_pem else None
        if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
            raise CertificateError(f"{owner.name}: has no ECDSA P-256 key; use the identity that the run was made with")
        self._key = key

    def sign_statement(self, subjects: Sequence[Subject], predicate_type: str, predicate: Mapping[str, Any]) -> bytes:
        """Return a DSSE envelope around an in-toto statement."""
        return canonical_json(self._make_envelope(subjects, predicate_type, predicate))

    def _make_envelope(
        self, subjects: Sequence[Subject], predicate_type: str, predicate: Mapping[str, Any]
    ) -> dict[str, Any]:
        payload = _statement_bytes(subjects, predicate_type, predicate)
        return _wrap_payload(payload, {"": self._sign_data(signed_bytes(payload))})

    def _sign_data(self, data: bytes) -> bytes:
        # with a nonce from the message (RFC 6979), the same statement has the same signature
        return self._key.sign(data, ec.ECDSA(hashes.SHA256(), deterministic_signing=True))

    def sign_cose(self, data: bytes) -> bytes:
        """Return an ES256 signature in the form of COSE: two numbers of 32 bytes."""
        return b"".join(number.to_bytes(32, "big") for number in decode_dss_signature(self._sign_data(data)))

    def sign_model(self, files: ModelFiles) -> bytes:
        """Return a model signature of OMS v1.0, method `key`."""
        predicate = {
            "serialization": {
                "method": "files",
                "hash_type": "sha256",
                "allow_symlinks": False,
                "ignore_paths": [*GIT_FILES, SIGNATURE_FILE],
            },
            "resources": [
                {"name": name, "algorithm": "sha256", "digest": digest} for name, digest in files.digests.items()
            ],
        }
        bundle = {
            "mediaType": OMS_MEDIA_TYPE,
            "verificationMaterial": {
                "publicKey": {"hint": hashlib.sha256(self.public_pem).hexdigest()},
                "tlogEntries": [],
            },
            "dsseEnvelope": self._make_envelope([files.subject], OMS_PREDICATE, predicate),
        }
        return canonical_json(bundle)

    def seal_members(self, digests: Mapping[str, str], predicate: Mapping[str, Any]) -> bytes:
        """Sign the digests of all members with each key that signs heads of the log."""
        subjects = [{"name": name, "digest": {"sha256": digest}} for name, digest in digests.items()]
        payload, owner = _statement_bytes(subjects, PASSPORT_PREDICATE, predicate), self._owner
        signatures = {owner.fingerprint: owner.sign_data(signed_bytes(payload))}
        if owner.public.ml_dsa_key:
            key_id = hashlib.sha256(owner.public.ml_dsa_key).hexdigest()
            signatures[key_id] = owner.sign_ml_dsa(signed_bytes(payload))
        return canonical_json(_wrap_payload(payload, signatures))

    @property
    def public_pem(self) -> bytes:
        """The public half of the P-256 key, as `model_signing verify key` reads it."""
        return self._encode_public(serialization.Encoding.PEM)

    @property
    def public_der(self) -> bytes:
        """The same as DER, whose digest names the key."""
        return self._encode_public(serialization.Encoding.DER)

    def _encode_public(self, encoding: serialization.Encoding) -> bytes:
        return self._key.public_key().public_bytes(encoding, serialization.PublicFormat.SubjectPublicKeyInfo)


def sign_by_ed25519(
    signer: Identity, subjects: Sequence[Subject], predicate_type: str, predicate: Mapping[str, Any]
) -> bytes:
    """Return a DSSE envelope around an in-toto statement, signed with an Ed25519 key that it names."""
    payload = _statement_bytes(subjects, predicate_type, predicate)
    return canonical_json(_wrap_payload(payload, {signer.fingerprint: signer.sign_data(signed_bytes(payload))}))


def _statement_bytes(subjects: Sequence[Subject], predicate_type: str, predicate: Mapping[str, Any]) -> bytes:
    statement = {
        "_type": STATEMENT_TYPE,
        "subject": list(subjects),
        "predicateType": predicate_type,
        "predicate": predicate,
    }
    return canonical_json(statement)


def _wrap_payload(payload: bytes, signatures: Mapping[str, bytes]) -> dict[str, Any]:
    return {
        "payload": base64.b64encode(payload).decode(),
        "payloadType": PAYLOAD_TYPE,
        "signatures": [
            {"keyid": key_id, "sig": base64.b64encode(signature).decode()} for key_id, signature in signatures.items()
        ],
    }


@dataclass(frozen=True)
class BuildFacts:
    """The facts of a training build that its provenance states.

    Attributes:
        run_file: The whole config as JSON; the log has its digest.
        dependencies: Name and SHA-256 of what went in.
        times: RFC 3339 times of the first and the last event of the log.
    """

    run: str
    run_file: Mapping[str, Any]
    dependencies: Mapping[str, str]
    internal: Mapping[str, Any]
    times: tuple[str, str]
    software: str


def make_provenance(signer: ReleaseSigner, files: ModelFiles, facts: BuildFacts) -> bytes:
    """Return SLSA provenance v1 of a training build."""
    dependencies = [{"name": name, "digest": {"sha256": digest}} for name, digest in facts.dependencies.items()]
    started, finished = facts.times
    predicate = {
        "buildDefinition": {
            "buildType": BUILD_TYPE,
            "externalParameters": {"run_file": facts.run_file},
            "internalParameters": dict(facts.internal),
            "resolvedDependencies": dependencies,
        },
        "runDetails": {
            "builder": {"id": "urn:phalanx:owner", "version": {"phalanx": facts.software}},
            "metadata": {"invocationId": facts.run, "startedOn": started, "finishedOn": finished},
        },
    }
    return signer.sign_statement([files.subject], SLSA_PREDICATE, predicate)


@dataclass(frozen=True)
class MeasuredTests:
    """An evaluation or a red-team report as a test result.

    Attributes:
        digest: SHA-256 of the file of the result.
        weights: Digest of the measured weights; None where only the owner knows that they were these.
        figures: Value of each figure as text.
        outcomes: Names of passed, warned and failed tests.
    """

    name: str
    digest: str
    weights: str | None
    figures: Mapping[str, str]
    outcomes: tuple[Sequence[str], Sequence[str], Sequence[str]]


def make_test_result(signer: ReleaseSigner, files: ModelFiles, run: str, tests: MeasuredTests) -> bytes:
    """Return an in-toto test result about the model."""
    notes = {"kind": tests.name, "run": run, "weights": tests.weights, "figures": dict(tests.figures)}
    configuration = {"name": f"{tests.name}.json", "digest": {"sha256": tests.digest}, "annotations": notes}
    passed, warned, failed = (sorted(names) for names in tests.outcomes)
    predicate: dict[str, Any] = {
        "configuration": [configuration],
        "passedTests": passed,
        "warnedTests": warned,
        "failedTests": failed,
    }
    predicate["result"] = judge_tests(predicate)
    return signer.sign_statement([files.subject], TEST_PREDICATE, predicate)
