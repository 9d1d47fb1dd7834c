"""A release: three files agree on the version, a changed file is refused, and the whole recipe runs (slow)."""

import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("release", ROOT / "scripts" / "release.py")
release = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(release)
needs_git = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no history here")
needs_ssh = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed")


def version_files(directory):
    for name in ("pyproject.toml", "src/phalanx/__init__.py", "CITATION.cff"):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, directory / name)
    return directory


def test_three_files_say_one_version(tmp_path):
    assert release.version_of(version_files(tmp_path)).count(".") == 2


@pytest.mark.parametrize("name", ["src/phalanx/__init__.py", "CITATION.cff"])
def test_a_file_with_another_version_is_named(tmp_path, name):
    file = version_files(tmp_path) / name
    file.write_text(file.read_text(encoding="utf-8").replace("0.1.0", "0.1.1"), encoding="utf-8")

    with pytest.raises(release.ReleaseError, match=f"{name}: does not say version 0.1.0"):
        release.version_of(tmp_path)


def test_two_builds_that_differ_by_a_byte_are_refused(tmp_path):
    first, second = tmp_path / "a.whl", tmp_path / "b.whl"
    first.write_bytes(b"one")
    second.write_bytes(b"two")

    release.refuse_differences([first], [first])
    with pytest.raises(release.ReleaseError, match=r"a\.whl: two builds of one commit differ"):
        release.refuse_differences([first], [second])


@pytest.fixture
def signed(tmp_path):
    """A signed file, and the public key."""
    key, file = tmp_path / "key", tmp_path / "out" / "phalanx.whl"
    file.parent.mkdir()
    file.write_bytes(b"wheel")
    release.call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key))
    release.sign([file], key)
    return file, Path(f"{key}.pub").read_text(encoding="utf-8")


@needs_ssh
def test_what_was_signed_holds(signed):
    file, public = signed

    release.verify(file.parent, public)

    # and it is this file that was signed, under its digest, with no other
    sums = (file.parent / release.SUMS).read_text(encoding="utf-8")
    assert sums == f"{hashlib.sha256(b'wheel').hexdigest()}  {file.name}\n"


@needs_ssh
def test_a_changed_file_is_refused(signed):
    file, public = signed
    file.write_bytes(b"wheel with more in it")

    with pytest.raises(release.ReleaseError, match=r"phalanx\.whl: is not the file that was signed"):
        release.verify(file.parent, public)


@needs_ssh
@pytest.mark.parametrize("attack", ["digests", "signature", "key"])
def test_changed_digests_a_cut_signature_and_a_foreign_key_are_refused(signed, tmp_path, attack):
    file, public = signed
    sums = file.parent / release.SUMS
    if attack == "digests":
        file.write_bytes(b"another")
        sums.write_text(f"{release.digest(file)}  {file.name}\n", encoding="utf-8")
    elif attack == "signature":
        sums.with_name(f"{release.SUMS}.sig").write_text("", encoding="utf-8")
    else:
        release.call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "foreign"))
        public = (tmp_path / "foreign.pub").read_text(encoding="utf-8")

    with pytest.raises(release.ReleaseError, match="ssh-keygen -Y verify"):
        release.verify(file.parent, public)


@needs_git
def test_the_list_of_parts_names_every_package_of_a_base_install_and_is_the_same_twice():
    text = release.bill_of_materials(ROOT)
    parts = {part["name"]: part for part in json.loads(text)["components"]}

    assert text == release.bill_of_materials(ROOT)
    assert {"torch", "transformers", "cryptography", "cffi", "grpcio", "numpy"} <= set(parts)
    assert not {"pytest", "ruff", "mkdocs"} & set(parts)
    assert all(part["purl"].startswith("pkg:pypi/") and part["licenses"] for part in parts.values())


@needs_git
@needs_ssh
@pytest.mark.slow
def test_the_whole_recipe_runs_and_is_the_same_twice(tmp_path):
    runs = [
        subprocess.run(
            [sys.executable, "scripts/release.py", "--out", str(tmp_path / name), "--try"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            env={"PATH": "/usr/bin:/bin", "TZ": zone, "HOME": str(tmp_path)},
        )
        for name, zone in (("one", "UTC"), ("two", "Asia/Kathmandu"))
    ]

    assert [run.returncode for run in runs] == [0, 0], runs
    assert runs[0].stdout == runs[1].stdout
    (wheel,) = (tmp_path / "one").glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {
        "phalanx/py.typed",
        "phalanx/report/page.css",
        "phalanx/serve/chat_page.html",
        "phalanx/planner/data/clusters.toml",
    } <= set(names)
    assert not [name for name in names if name.startswith(("tests/", "docs/"))]
    (sources,) = (tmp_path / "one").glob("*.tar.gz")
    with tarfile.open(sources) as archive:
        assert any(name.endswith("/tests/conftest.py") for name in archive.getnames())
    assert {path.name for path in (tmp_path / "one").iterdir()} == {
        *(wheel.name, sources.name, "sbom.cdx.json", "SHA256SUMS", "SHA256SUMS.sig")
    }


@pytest.mark.parametrize("options", [[], ["--key", "k", "--try"]])
def test_a_key_or_a_trial_and_not_both(monkeypatch, tmp_path, options):
    monkeypatch.setattr(sys, "argv", ["release.py", "--out", str(tmp_path), *options])

    with pytest.raises(release.ReleaseError, match="either --key or --try"):
        release.main()
