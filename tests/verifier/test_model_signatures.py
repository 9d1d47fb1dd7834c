"""OMS v1.0: the published vectors, and what a signature must not let through."""

import base64
import copy
import json
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from phalanx.verifier.forms import RefusedError
from phalanx.verifier.statement import compare_model, open_model_signature

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "oms" / "bundles.json").read_text())
KEY = serialization.load_pem_public_key(VECTORS["public_key"].encode())
SIMPLE = VECTORS["valid"]["key-simple"]
FILES = {
    "key-simple": {"signme-1": b"signme-1\n", "signme-2": b"signme-2", "ignore-me": b""},
    "key-simple-go": {"signme-1": b"signme-1\n", "signme-2": b"signme-2"},
    "key-multi-file": {
        "config.json": b'{"model": "test", "version": "1.0"}',
        "weights.bin": b"\xab" * 1024,
        "subdir/adapter.bin": b"\xcd" * 512,
    },
}


def write_files(home: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_bytes(content)
    return home


@pytest.mark.parametrize("name", VECTORS["valid"])
def test_a_published_signature_holds_for_its_model(name: str, tmp_path: Path) -> None:
    signature = open_model_signature(json.dumps(VECTORS["valid"][name]).encode(), KEY)

    home = write_files(tmp_path, FILES[name])
    compare_model(home, signature)
    # it was no empty comparison
    write_files(home, {"more.bin": b"x"})
    with pytest.raises(RefusedError):
        compare_model(home, signature)


@pytest.mark.parametrize("name", VECTORS["invalid"])
def test_a_published_invalid_signature_is_refused(name: str) -> None:
    with pytest.raises(RefusedError):
        open_model_signature(json.dumps(VECTORS["invalid"][name]).encode(), KEY)


def without(*path: str) -> dict:
    bundle = copy.deepcopy(SIMPLE)
    inner = bundle
    for name in path[:-1]:
        inner = inner[name]
    del inner[path[-1]]
    return bundle


@pytest.mark.parametrize(
    "bundle",
    [
        without("dsseEnvelope"),
        without("verificationMaterial"),
        without("verificationMaterial", "publicKey"),
        without("dsseEnvelope", "signatures"),
        {**SIMPLE, "mediaType": "application/vnd.dev.sigstore.bundle.v0.2+json"},
        {**SIMPLE, "dsseEnvelope": {**SIMPLE["dsseEnvelope"], "signatures": SIMPLE["dsseEnvelope"]["signatures"] * 2}},
        {**SIMPLE, "dsseEnvelope": {**SIMPLE["dsseEnvelope"], "payload": "e30="}},
    ],
    ids=["envelope", "material", "key", "signatures", "media type", "two signatures", "payload"],
)
def test_a_malformed_bundle_is_refused(bundle: dict) -> None:
    with pytest.raises(RefusedError):
        open_model_signature(json.dumps(bundle).encode(), KEY)


@pytest.mark.parametrize("cut", [0, 1, 500])
def test_a_truncated_bundle_is_refused(cut: int) -> None:
    with pytest.raises(RefusedError):
        open_model_signature(json.dumps(SIMPLE).encode()[:cut], KEY)


def test_base64_in_another_form_is_refused() -> None:
    """The last character of a padded text may differ and decode to the same bytes."""
    bundle = copy.deepcopy(SIMPLE)
    signature = base64.b64decode(bundle["dsseEnvelope"]["signatures"][0]["sig"])
    bundle["dsseEnvelope"]["signatures"][0]["sig"] = base64.b64encode(signature).decode() + "\n"

    with pytest.raises(RefusedError):
        open_model_signature(json.dumps(bundle).encode(), KEY)


def add_file(home: Path) -> None:
    (home / "extra.py").write_text("surprise")


def add_nested_git(home: Path) -> None:
    write_files(home, {"deep/.git/hooks": b"surprise"})


def link_file(home: Path) -> None:
    (home / "signme-2").rename(home.parent / "elsewhere")
    (home / "signme-2").symlink_to(home.parent / "elsewhere")


@pytest.mark.parametrize(
    "change",
    [
        add_file,
        add_nested_git,
        link_file,
        lambda home: (home / "signme-1").write_bytes(b"signme-1"),
        lambda home: (home / "signme-2").unlink(),
        lambda home: (home / "signme-2").rename(home / "signme-3"),
    ],
    ids=["extra", "nested git", "link", "changed", "missing", "renamed"],
)
def test_a_changed_model_is_refused(change, tmp_path: Path) -> None:
    home = write_files(tmp_path / "model", FILES["key-simple"])
    signature = open_model_signature(json.dumps(SIMPLE).encode(), KEY)
    change(home)

    with pytest.raises(RefusedError):
        compare_model(home, signature)


def test_files_of_git_at_the_top_are_left_out(tmp_path: Path) -> None:
    home = write_files(tmp_path, {**FILES["key-simple"], ".git/HEAD": b"x", ".gitattributes": b""})

    signature = open_model_signature(json.dumps(SIMPLE).encode(), KEY)
    compare_model(home, signature)
    # files of git are left out at the top alone
    write_files(tmp_path, {"sub/.gitattributes": b""})
    with pytest.raises(RefusedError):
        compare_model(home, signature)
