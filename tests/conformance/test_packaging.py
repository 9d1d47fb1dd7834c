"""What a base install brings, how a container is made of it, and the files that a public repository has."""

import re
import tomllib
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MAX_BESIDE_TORCH = 35
"""ADR 100 says why it is not 30; one more must be meant."""


def brought_by(requirements):
    """Every package that an installation of these brings here, by the installed packages' metadata."""
    found, left = set(), [Requirement(text) for text in requirements]
    while left:
        wanted = left.pop()
        name = canonicalize_name(wanted.name)
        if name not in found and (wanted.marker is None or wanted.marker.evaluate({"extra": ""})):
            found.add(name)
            left += map(Requirement, distribution(name).requires or ())
    return found


def test_a_base_install_brings_few_packages_beside_torch():
    beside = brought_by(PROJECT["dependencies"]) - brought_by(["torch"])
    page = (ROOT / "docs" / "howto" / "install.md").read_text(encoding="utf-8")
    of_transformers = brought_by(["transformers"]) - brought_by(["torch"])

    assert len(beside) <= MAX_BESIDE_TORCH, sorted(beside)
    assert f"a base install is {len(beside)} packages: {len(of_transformers)} are those of `transformers`" in page
    assert beside - of_transformers == {"blake3", "cffi", "cryptography", "grpcio", "psutil", "pycparser", "tomli-w"}


def test_every_extra_says_what_it_is_for():
    page = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    rows = {
        name
        for row in re.findall(r"^\| ((?:`[a-z0-9-]+`(?:, )?)+) \|", page, re.M)
        for name in re.findall(r"`([\w-]+)`", row)
    }

    assert set(PROJECT["optional-dependencies"]) - {"dev", "site"} - rows == set()


def test_every_package_of_an_extra_has_a_pinned_version():
    pinned = {
        canonicalize_name(line.partition("==")[0])
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if "==" in line
    }
    wanted = {Requirement(text).name for texts in PROJECT["optional-dependencies"].values() for text in texts}

    assert {canonicalize_name(name) for name in wanted} - pinned - UNPINNED == set()


UNPINNED = {"nvidia-ml-py"}
"""Never installed where the tests run."""


@pytest.fixture
def container():
    """The instructions of the container file, each with what stands behind it."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Containerfile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    return [tuple(line.split(None, 1)) for line in text.replace("\\\n", " ").splitlines() if line.strip()]


def test_the_container_is_made_of_local_wheels_alone(container):
    runs = [rest for word, rest in container if word == "RUN"]

    assert container[0][0] == "FROM"
    assert {word for word, _ in container} <= {
        "FROM",
        "COPY",
        "RUN",
        "ENV",
        "USER",
        "WORKDIR",
        "EXPOSE",
        "ENTRYPOINT",
        "CMD",
    }
    assert all("--no-index" in run for run in runs if "pip " in run) and runs
    assert not re.search(r"curl|wget|apt-get|https?://", " ".join(runs))


def test_the_container_names_its_base_runs_as_a_user_and_starts_the_program(container):
    last = dict(container)

    image, _, tag = last["FROM"].rpartition(":")
    assert image and tag != "latest"
    assert tag.startswith(tuple(f"{version}-" for version in supported()))
    assert last["USER"] not in ("root", "0") and f"useradd --create-home --uid 10001 {last['USER']}" in last["RUN"]
    assert last["ENTRYPOINT"] == '["phalanx"]' and "phalanx" in PROJECT["scripts"]


def test_a_container_gets_nothing_that_it_does_not_copy(container):
    ignored = (ROOT / ".containerignore").read_text(encoding="utf-8").split()
    copied = {rest.split()[0] for word, rest in container if word == "COPY"}

    assert ignored[0] == "*"
    assert {line.removeprefix("!") for line in ignored[1:]} == copied


def supported():
    return [found[1] for one in PROJECT["classifiers"] if (found := re.search(r":: (3\.\d+)$", one))]


def test_documents_name_the_versions_of_python_that_the_package_names():
    page = (ROOT / "docs" / "howto" / "install.md").read_text(encoding="utf-8")

    assert all(version in page for version in supported())
    assert PROJECT["requires-python"] == f">={supported()[0]}"


@pytest.mark.parametrize("name", ["bug.yml", "idea.yml", "config.yml"])
def test_issue_forms_ask_for_what_is_needed(name):
    yaml = pytest.importorskip("yaml")
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / name).read_text(encoding="utf-8"))

    if name == "config.yml":
        assert form == {"blank_issues_enabled": False}
        return
    fields = [part for part in form["body"] if part["type"] != "markdown"]
    assert form["name"] and form["description"] and fields
    assert len({part["id"] for part in fields}) == len(fields)
    assert all(part["attributes"]["label"] for part in fields)


def test_the_citation_has_what_the_format_asks_for():
    yaml = pytest.importorskip("yaml")
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))

    assert {"cff-version", "message", "title", "authors", "version", "license", "type"} <= set(cited)
    assert cited["license"] == PROJECT["license"] and cited["version"] == PROJECT["version"]
    assert cited["authors"] and all(author["name"] for author in cited["authors"])
    assert (ROOT / "SECURITY.md").is_file() and (ROOT / ".github" / "PULL_REQUEST_TEMPLATE.md").is_file()
