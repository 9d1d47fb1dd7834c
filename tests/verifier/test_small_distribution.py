"""phalanx-verify as strangers install it: a wheel of its own, in an environment without torch."""

import ast
import importlib.util
import json
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from forger import MODEL, SMALL, Forger

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "phalanx" / "verifier"
MAX_LINES = 2500
PACKAGES = ("cryptography", "blake3", "cffi", "_cffi_backend")


def imported_roots(file: Path) -> set[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    roots = {
        alias.name.partition(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
    }
    absolute = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level == 0]
    assert all(node.level <= 1 for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    return roots | {str(node.module).partition(".")[0] for node in absolute}


def test_it_imports_nothing_but_python_cryptography_and_blake3() -> None:
    roots = set().union(*(imported_roots(file) for file in SOURCE.glob("*.py")))

    assert roots - sys.stdlib_module_names == {"blake3", "cryptography"}


def test_it_is_short_enough_to_be_read() -> None:
    lines = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in SOURCE.rglob("*.py"))

    assert lines < MAX_LINES


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel and its two packages, which are linked from this one; nothing is fetched."""
    home = tmp_path_factory.mktemp("stranger")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(home / "dist")]
    subprocess.run(build, cwd=ROOT / "verify", check=True, capture_output=True)
    (wheel,) = (home / "dist").glob("phalanx_verify-*.whl")
    venv.create(home / "env", with_pip=False, symlinks=True)
    (site,) = (home / "env" / "lib").glob("python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        origin = Path(spec.origin)
        origin = origin.parent if origin.name.startswith("__init__") else origin
        (site / origin.name).symlink_to(origin)
    return home / "env" / "bin" / "python"


def verify(stranger: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    words = [str(stranger), "-I", "-m", "phalanx_verify", *map(str, arguments)]
    clean = {"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(words, capture_output=True, text=True, env=clean, check=False)


def test_a_stranger_verifies_a_passport_with_its_model(stranger: Path, tmp_path: Path) -> None:
    done = verify(stranger, SMALL, "--owner", Forger().owner.public.public_key.hex(), "--model", MODEL)

    assert (done.returncode, done.stderr) == (0, "")
    assert "passport of a run: holds" in done.stdout
    assert "convicted: worker-1" in done.stdout
    torch = subprocess.run([stranger, "-I", "-c", "import torch"], capture_output=True, check=False)
    assert torch.returncode == 1


def test_a_stranger_refuses_a_forgery_and_names_the_member(stranger: Path, tmp_path: Path) -> None:
    forger = Forger()
    forger.facts["audits"]["proven"] = 600
    forged = forger.write_sealed(tmp_path / "forged")

    done = verify(stranger, forged, "--json")

    answer = json.loads(done.stdout)
    assert (done.returncode, answer["verdict"]) == (5, "refused")
    assert answer["reason"].startswith("log/events.jsonl: the seal says audits")


def test_a_stranger_verifies_a_proof_and_evidence_from_an_unpacked_passport(stranger: Path, tmp_path: Path) -> None:
    forger = Forger()
    for name, content in forger.members.items():
        (tmp_path / Path(name).name).write_bytes(content)
    (proof,) = tmp_path.glob("*.proof.json")
    (evidence,) = tmp_path.glob("step-*worker-1.json")

    done = verify(stranger, proof, evidence)

    # the lie itself is recomputed by Phalanx
    assert done.returncode == 7
    assert "proof about a document: holds" in done.stdout
    assert "accused: worker-1: message" in done.stdout


def test_a_missing_file_and_something_else_have_their_exit_codes(stranger: Path, tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("Dear verifier")

    assert verify(stranger, tmp_path / "nothing").returncode == 3
    assert verify(stranger, tmp_path / "letter.txt").returncode == 5
    assert verify(stranger, tmp_path).returncode == 3
    assert verify(stranger).returncode == 2
