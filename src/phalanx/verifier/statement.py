"""Statements of others' formats: in-toto in DSSE envelopes, and model signatures of the OpenSSF (OMS v1.0)."""

import base64
import binascii
import hashlib
import operator
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec

from .forms import (
    DIGEST,
    CertifiedParty,
    Member,
    RefusedError,
    UnreadableError,
    canonical,
    check_ecdsa_signature,
    check_ml_dsa_signature,
    check_raw_signature,
    is_plain_path,
    read_json,
    require,
    sha256,
)

PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
OMS_MEDIA_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
OMS_PREDICATE = "https://model_signing/signature/v1.0"
SLSA_PREDICATE = "https://slsa.dev/provenance/v1"
TEST_PREDICATE = "https://in-toto.io/attestation/test-result/v0.1"
EXPORT_PREDICATE = "urn:phalanx:edge-export:1"
ATTESTATION_PREDICATE = "urn:phalanx:reverification:1"
GIT_FILES = (".git", ".gitattributes", ".github", ".gitignore")
"""Left out of a model signature at the top of the directory."""
SIGNATURE_FILE = "model.sig"
_MAX_HEADER_BYTES = 2**27
_PIECE = 2**20
_ADAPTER_PREFIX = "base_model.model."
_ALONE, _INDEX = ("model.safetensors", "adapter_model.safetensors"), "model.safetensors.index.json"
_PLAIN_KINDS = ("", ".json", ".jinja", ".md", ".model", ".tiktoken", ".txt")
"""Endings of files that hold neither weights nor code."""
_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip

CheckPayload = Callable[[bytes, bytes], None]
"""Takes a signature and the signed bytes, and raises ValueError where it does not hold."""


def signed_bytes(payload: bytes) -> bytes:
    """Return the bytes that a DSSE signature covers (its pre-authentication encoding)."""
    return b"DSSEv1 %d %s %d %s" % (len(PAYLOAD_TYPE), PAYLOAD_TYPE.encode(), len(payload), payload)


def by_release_key(key: ec.EllipticCurvePublicKey) -> CheckPayload:
    """Return a check of ECDSA signatures."""
    return lambda signature, data: check_ecdsa_signature(key, signature, data)


def by_ed25519_key(key: bytes) -> CheckPayload:
    """Return a check of Ed25519 signatures."""
    return lambda signature, data: check_raw_signature(key, signature, data)


def list_log_keys(party: CertifiedParty) -> dict[str, CheckPayload]:
    """Return checks of the signatures that a party makes for later readers, by the name of each key."""
    checks = {party.fingerprint: by_ed25519_key(party.key)}
    if party.second_key:
        checks[sha256(party.second_key)] = lambda signed, data: check_ml_dsa_signature(party.second_key, signed, data)
    return checks


def open_statement(data: bytes, checks: Sequence[CheckPayload], predicate_type: str) -> dict[str, Any]:
    """Check the signatures of a DSSE envelope, one by each check, and return its in-toto statement.

    Raises:
        RefusedError: It is malformed, of another kind, or another key signed it.
    """
    try:
        return _open_envelope(read_json(data), checks, predicate_type)
    except (ValueError, KeyError, TypeError, binascii.Error) as exc:
        raise RefusedError(f"no statement of this kind, or altered: {exc}") from exc


def _open_envelope(envelope: Any, checks: Sequence[CheckPayload], predicate_type: str) -> dict[str, Any]:
    require(envelope["payloadType"] == PAYLOAD_TYPE, f"payload type {envelope['payloadType']!r:.80}")
    payload = _decode(envelope["payload"])
    for check, signature in zip(checks, envelope["signatures"], strict=True):
        check(_decode(signature["sig"]), signed_bytes(payload))
    statement = read_json(payload)
    is_expected = statement["_type"] == STATEMENT_TYPE and statement["predicateType"] == predicate_type
    require(is_expected, f"a statement of {statement['predicateType']!r:.80}, expected {predicate_type}")
    for subject in statement["subject"]:
        require(isinstance(subject["name"], str) and bool(subject["digest"]), "a subject without name or digest")
    require(isinstance(statement["predicate"], dict) and bool(statement["subject"]), "a statement about nothing")
    return dict(statement)


def _decode(text: str) -> bytes:
    data = base64.b64decode(text, validate=True)
    require(base64.b64encode(data).decode() == text, "base64 in another form than the usual one")
    return data


def read_key_id(data: bytes) -> str:
    """Return the key that an envelope says it is signed with; nothing is checked."""
    try:
        key_id = read_json(data)["signatures"][0]["keyid"]
    except (ValueError, KeyError, TypeError, IndexError) as exc:
        raise RefusedError(f"no DSSE envelope: {exc}") from exc
    require(isinstance(key_id, str) and DIGEST.fullmatch(key_id) is not None, "the envelope names no key")
    return str(key_id)


# --- model signatures -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelSignature:
    """What a model signature covers.

    Attributes:
        root: SHA-256 over the digests of all files, in hex.
        files: Algorithm and digest of each file, by its path.
        ignored: Paths beside it that the signature leaves out.
    """

    name: str
    root: str
    files: dict[str, tuple[str, str]]
    ignored: tuple[str, ...]


def open_model_signature(data: bytes, key: ec.EllipticCurvePublicKey) -> ModelSignature:
    """Check a model signature of the method `key`, without the model.

    Raises:
        RefusedError: It is malformed, not in the form of OMS v1.0, or another key signed it.
    """
    try:
        bundle = read_json(data)
        require(bundle["mediaType"] == OMS_MEDIA_TYPE, f"media type {bundle['mediaType']!r:.80}")
        require("publicKey" in dict(bundle["verificationMaterial"]), "no public key named in it")
        return _read_model_statement(_open_envelope(bundle["dsseEnvelope"], [by_release_key(key)], OMS_PREDICATE))
    except (ValueError, KeyError, TypeError, AttributeError, binascii.Error) as exc:
        raise RefusedError(f"no model signature, or altered: {exc}") from exc


def _read_model_statement(statement: Mapping[str, Any]) -> ModelSignature:
    (subject,) = statement["subject"]
    serialization, resources = statement["predicate"]["serialization"], statement["predicate"]["resources"]
    is_plain = serialization["method"] == "files" and serialization.get("allow_symlinks") is False
    require(is_plain, "files are not hashed one by one, or links are followed")
    names = [resource["name"] for resource in resources]
    require(bool(names) and names == sorted(set(names)), "its files are not in order, or there are none")
    total, files = hashlib.sha256(), {}
    for resource in resources:
        name, algorithm, value = resource["name"], resource["algorithm"], resource["digest"]
        is_usable = algorithm in ("sha256", "blake3") and DIGEST.fullmatch(value) and is_plain_path(name)
        require(bool(is_usable), f"file {name!r:.80} has no usable path or digest")
        total.update(bytes.fromhex(value))
        files[name] = (algorithm, value)
    require(subject["digest"] == {"sha256": total.hexdigest()}, "the digest of all files is not that of these files")
    return ModelSignature(subject["name"], total.hexdigest(), files, tuple(serialization.get("ignore_paths", ())))


def compare_model(directory: Path, signature: ModelSignature) -> None:
    """Compare a model's directory with its signature.

    Raises:
        RefusedError: A file was changed, added or taken away, or is a link.
        UnreadableError: A file cannot be read.
    """
    ignored = {*GIT_FILES, *(path.removeprefix("./") for path in signature.ignored), SIGNATURE_FILE}
    present = set(_list_files(directory, directory, ignored))
    require(present == set(signature.files), _describe_difference(directory, present, set(signature.files)))
    for name, (algorithm, value) in signature.files.items():
        actual = hash_file(directory / name, algorithm)
        require(actual == value, f"{directory / name}: was changed: {algorithm} {actual}, signed {value}")


def _describe_difference(directory: Path, present: set[str], signed: set[str]) -> str:
    return f"{directory}: not signed: {sorted(present - signed)[:5]}; missing: {sorted(signed - present)[:5]}"


def _list_files(root: Path, directory: Path, ignored: set[str]) -> Iterator[str]:
    try:
        for path in sorted(directory.iterdir()):
            name = path.relative_to(root).as_posix()
            if name in ignored:
                continue
            require(not path.is_symlink(), f"{path}: is a link")
            if path.is_dir():
                yield from _list_files(root, path, ignored)
            else:
                yield name
    except OSError as exc:
        raise UnreadableError(f"{directory}: cannot be read ({exc.strerror})") from exc


def hash_file(path: Path, algorithm: str = "sha256") -> str:
    """Return the digest of a file in hex."""
    return Member.from_file(path).hash_content(algorithm)


# --- weights --------------------------------------------------------------------------------------------


def digest_weights(directory: Path) -> str:
    """Return the digest of the tensors in a model's safetensors files, as a run signs it at its end.

    It is that of the run where the files have the names of the run's own parameters, which `phalanx passport` states.

    Raises:
        RefusedError: A file is no safetensors file, a tensor is there twice, or a program may load others than these.
    """
    tensors: dict[str, tuple[str, list[int], Member]] = {}
    for path in list_weight_files(directory):
        for name, tensor in _read_tensors(path):
            require(name not in tensors, f"{path}: tensor {name!r:.80} is there twice")
            tensors[name] = tensor
    require(bool(tensors), f"{directory}: has no tensors")
    if (index := directory / _INDEX).exists():
        try:
            named = read_json(Member.from_file(index).read_all(_MAX_HEADER_BYTES))["weight_map"]
        except (ValueError, KeyError, TypeError) as exc:
            raise RefusedError(f"{index}: no index of weights ({exc})") from exc
        actual = {name: content.path.name for name, (_, _, content) in tensors.items()}
        require(named == actual, f"{index}: names other files for tensors than those that have them")
    total = hashlib.sha256()
    for name in sorted(tensors):
        dtype, shape, content = tensors[name]
        total.update(canonical([name, f"torch.{dtype}", shape, content.size]) + b"\n")
        for offset in range(0, content.size, _PIECE):
            total.update(content.read_range(offset, min(_PIECE, content.size - offset)))
    return total.hexdigest()


def list_weight_files(directory: Path) -> list[Path]:
    """Return a model's files of weights; refuse a directory in which a program may find others, such as pickles."""
    names = list(_list_files(directory, directory, {*GIT_FILES, SIGNATURE_FILE}))
    weights = sorted(name for name in names if "/" not in name and name.endswith(".safetensors"))
    for name in names:
        is_plain = name in weights or Path(name).suffix in _PLAIN_KINDS
        require(is_plain, f"{directory / name}: may be loaded in the place of the tensors that are compared; remove it")
    is_found = weights in [[name] for name in _ALONE] or (_INDEX in names and "model.safetensors" not in weights)
    require(is_found or not weights, f"{directory}: no program finds its tensors in {', '.join(weights[:5])}")
    return [directory / name for name in weights]


def _read_tensors(path: Path) -> Iterator[tuple[str, tuple[str, list[int], Member]]]:
    file = Member.from_file(path)
    (size,) = struct.unpack("<Q", file.read_range(0, 8))
    # a header is the work of whoever hands the model over
    require(size <= _MAX_HEADER_BYTES, f"{path}: no safetensors file")
    rest = end = file.size - 8 - size
    try:
        header = read_json(file.read_range(8, size))
        for name, facts in header.items():
            if name != "__metadata__":
                begin, stop = map(operator.index, facts["data_offsets"])
                content = Member(path, 8 + size + begin, stop - begin)
                rest -= content.size
                # tensors that share their bytes would be read again and again
                require(0 <= begin <= stop <= end and rest >= 0, f"{path}: no safetensors file")
                short_name = name.removeprefix(_ADAPTER_PREFIX) if path.name.startswith("adapter_") else name
                yield short_name, (_DTYPES[facts["dtype"]], facts["shape"], content)
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise RefusedError(f"{path}: no safetensors file ({exc})") from exc


# --- exports --------------------------------------------------------------------------------------------


def open_export(data: bytes) -> tuple[str, dict[str, Any]]:
    """Check the statement of an export; return the key that signed it and the statement.

    Raises:
        RefusedError: It is malformed or altered.
    """
    key = read_key_id(data)
    return key, open_statement(data, [by_ed25519_key(bytes.fromhex(key))], EXPORT_PREDICATE)


def compare_export(directory: Path, statement: Mapping[str, Any]) -> None:
    """Compare the files of an export with its statement; refuse one that was changed, added or taken away."""
    signed = {subject["name"]: subject["digest"].get("sha256") for subject in statement["subject"]}
    require(all(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}", name) for name in signed), "a file's name is a path")
    present = set(_list_files(directory, directory, {"statement.dsse.json"}))
    require(present == set(signed), _describe_difference(directory, present, set(signed)))
    for name, value in signed.items():
        require(hash_file(directory / name) == value, f"{directory / name}: was changed")
