"""A release: wheel and source archive with the same bytes on every machine, a list of parts, digests, a signature.

``python scripts/release.py --out dist --key KEY`` makes one of the commit that is checked out; with ``--try`` a
throw-away key signs, and neither a clean tree nor a changelog is asked for. Nothing is sent anywhere.
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import Distribution, distribution
from pathlib import Path

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
NAMESPACE = "phalanx-release"
SIGNER = "release@phalanx"
SUMS = "SHA256SUMS"


class ReleaseError(SystemExit):
    """A reason not to release."""


def main() -> int:
    """Make a release, check its signature as a user would, and print the digests."""
    wanted = argparse.ArgumentParser(description=__doc__)
    wanted.add_argument("--out", type=Path, required=True, help="where the files go")
    wanted.add_argument("--key", type=Path, help="the maintainers' SSH key")
    wanted.add_argument("--try", action="store_true", dest="is_trial", help="sign with a throw-away key")
    given = wanted.parse_args()
    if (given.key is None) is not given.is_trial:
        raise ReleaseError("give either --key or --try")
    with tempfile.TemporaryDirectory() as folder:
        if given.is_trial:
            given.key = Path(folder, "key")
            call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(given.key))
        else:
            refuse_unready(version_of(ROOT))
        given.out.mkdir(parents=True, exist_ok=True)
        sources = check_out(Path(folder, "sources"))
        files = build(sources, given.out, epoch())
        refuse_differences(files, build(check_out(Path(folder, "others")), Path(folder, "again"), epoch()))
        parts = given.out / "sbom.cdx.json"
        parts.write_text(bill_of_materials(sources), encoding="utf-8")
        sign([*files, parts], given.key)
        verify(given.out, given.key.with_name(f"{given.key.name}.pub").read_text(encoding="utf-8"))
    print((given.out / SUMS).read_text(encoding="utf-8"), end="")  # noqa: T201
    return 0


def refuse_unready(version: str) -> None:
    """Refuse a tree with changes and a version without its section in the changelog."""
    if call("git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no"):
        raise ReleaseError("there are uncommitted changes; commit them, or use --try")
    if not re.search(rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.M):
        raise ReleaseError(f"CHANGELOG.md: has no section [{version}] with a date; make one of [Unreleased]")


def version_of(sources: Path) -> str:
    """Return the version, which three files must agree about."""
    version = str(tomllib.loads((sources / "pyproject.toml").read_text())["project"]["version"])
    told = {
        "src/phalanx/__init__.py": rf'^__version__ = "{re.escape(version)}"$',
        "CITATION.cff": rf"^version: {re.escape(version)}$",
    }
    for file, line in told.items():
        if not re.search(line, (sources / file).read_text(encoding="utf-8"), re.MULTILINE):
            raise ReleaseError(f"{file}: does not say version {version}, which pyproject.toml says")
    return version


def epoch() -> str:
    """Return the commit's time, which every file of a release gets."""
    return call("git", "-C", str(ROOT), "log", "-1", "--format=%ct").strip()


def check_out(to: Path) -> Path:
    """Write the committed files, and no other, into a new directory."""
    to.mkdir()
    archive = to.with_suffix(".tar")
    call("git", "-C", str(ROOT), "archive", "--format=tar", f"--output={archive}", "HEAD")
    shutil.unpack_archive(archive, to, filter="data")
    return to


def build(sources: Path, to: Path, seconds: str) -> list[Path]:
    """Build wheel and source archive of a directory."""
    version = version_of(sources)
    command = ["-m", "hatchling", "build", "--target", "wheel", "--target", "sdist", "--directory", str(to.resolve())]
    call(sys.executable, *command, cwd=sources, environment=os.environ | {"SOURCE_DATE_EPOCH": seconds})
    return [to / f"phalanx_train-{version}-py3-none-any.whl", to / f"phalanx_train-{version}.tar.gz"]


def refuse_differences(files: list[Path], again: list[Path]) -> None:
    """Refuse a build that is not the same a second time."""
    for first, second in zip(files, again, strict=True):
        if digest(first) != digest(second):
            raise ReleaseError(f"{first.name}: two builds of one commit differ, {digest(first)} and {digest(second)}")


def bill_of_materials(sources: Path) -> str:
    """Return the packages of a base install, as they are installed here, as CycloneDX."""
    project = tomllib.loads((sources / "pyproject.toml").read_text())["project"]
    found: dict[str, Distribution] = {}
    for requirement in project["dependencies"]:
        collect(requirement, found)
    bom = Bom(version=1)
    # no number by chance and no time of day: two lists of the same packages are the same bytes
    bom.metadata.timestamp = datetime.fromtimestamp(int(epoch()), UTC)
    whole = Component(name=project["name"], version=project["version"], type=ComponentType.APPLICATION, bom_ref="self")
    bom.metadata.component = whole
    parts = [component(name, one) for name, one in sorted(found.items())]
    for part in parts:
        bom.components.add(part)
    bom.register_dependency(whole, parts)
    text: str = JsonV1Dot6(bom).output_as_string(indent=1)
    return re.sub(r'\n "serialNumber": "[^"]*",', "", text) + "\n"


def collect(requirement: str, found: dict[str, Distribution]) -> None:
    """Add a package and what it needs on this machine, without extras."""
    wanted = Requirement(requirement)
    name = canonicalize_name(wanted.name)
    if name in found or (wanted.marker is not None and not wanted.marker.evaluate({"extra": ""})):
        return
    found[name] = distribution(name)
    for further in found[name].requires or ():
        collect(further, found)


def component(name: str, found: Distribution) -> Component:
    """Return one package with its version and the licence that it states."""
    about = found.metadata
    known = about.get("License-Expression") or about.get("License") or ""
    said = known.strip().partition("\n")[0] or ", ".join(
        one.rpartition(" :: ")[2] for one in about.get_all("Classifier") or () if one.startswith("License ::")
    )
    return Component(
        name=name,
        version=found.version,
        type=ComponentType.LIBRARY,
        bom_ref=f"{name}@{found.version}",
        purl=PackageURL("pypi", name=name, version=found.version),
        licenses=[LicenseFactory().make_from_string(said)] if said else [],
    )


def sign(files: list[Path], key: Path) -> None:
    """Write the files' digests and a signature over them."""
    sums = files[0].parent / SUMS
    sums.write_text("".join(f"{digest(file)}  {file.name}\n" for file in files), encoding="utf-8")
    sums.with_name(f"{SUMS}.sig").unlink(missing_ok=True)
    call("ssh-keygen", "-q", "-Y", "sign", "-f", str(key), "-n", NAMESPACE, str(sums))


def verify(release: Path, public_key: str) -> None:
    """Check signature and digests as a user does with a public key from elsewhere.

    Raises:
        ReleaseError: A file is not what was signed.
    """
    sums = release / SUMS
    with tempfile.TemporaryDirectory() as folder:
        allowed = Path(folder, "allowed_signers")
        allowed.write_text(f"{SIGNER} {public_key}", encoding="utf-8")
        command = ["-Y", "verify", "-f", str(allowed), "-I", SIGNER, "-n", NAMESPACE, "-s", f"{sums}.sig"]
        call("ssh-keygen", *command, told=sums.read_bytes())
    for line in sums.read_text(encoding="utf-8").splitlines():
        expected, _, name = line.partition("  ")
        if digest(release / name) != expected:
            raise ReleaseError(f"{name}: is not the file that was signed")


def digest(file: Path) -> str:
    """Return the SHA-256 of a file."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def call(
    program: str,
    *arguments: str,
    told: bytes | None = None,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Run a program of this machine and return what it printed.

    Raises:
        ReleaseError: It is not installed, or it failed.
    """
    path = shutil.which(program)
    if path is None:
        raise ReleaseError(f"{program} is not installed")
    done = subprocess.run(  # noqa: S603 - git, ssh-keygen and the build backend
        [path, *arguments], input=told, capture_output=True, check=False, cwd=cwd, env=environment
    )
    if done.returncode:
        raise ReleaseError(f"{program} {' '.join(arguments)}: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout.decode()


if __name__ == "__main__":
    raise SystemExit(main())
