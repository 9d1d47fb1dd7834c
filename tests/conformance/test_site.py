"""The documentation as a site: every page is in it, it builds without a warning, and reading it fetches nothing."""

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
MADE = {"reference/commands.md", "reference/errors.md", "reference/python.md", "adr/index.md"}
HAS_MKDOCS = all(importlib.util.find_spec(name) for name in ("mkdocs", "material", "mkdocstrings"))
FETCHED = re.compile(r"<(?:script|img|link|iframe|source)\b[^>]*\b(?:src|href)=\"?(https?://[^\"\s>]+)")


def test_every_page_is_in_the_navigation_and_every_entry_is_a_page():
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    listed = set(re.findall(r": ([\w/.-]+\.md)$", nav, re.MULTILINE))
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}

    assert listed - pages == MADE
    assert {page for page in pages - listed if not page.startswith(("adr/", "images/"))} == set()


def commands_of(page):
    blocks = re.findall(r"```sh\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)
    return "".join(blocks)


@pytest.mark.slow
@pytest.mark.skipif(not HAS_MKDOCS, reason="the extra `site` is not installed")
def test_the_site_builds_and_reading_it_fetches_nothing(tmp_path):
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert built.returncode == 0, built.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 80
    asked = {link for page in pages for link in FETCHED.findall(page.read_text(encoding="utf-8"))}
    assert asked == set()
    assert "phalanx train" in (tmp_path / "site" / "reference" / "commands.html").read_text(encoding="utf-8")


def follow(page, place):
    """Run the commands of a page as they stand, from an empty directory; return what they print."""
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PHALANX_CACHE": str(place / "cache"),
    }
    command = ["/bin/bash", "-euo", "pipefail", "-c", commands_of(page)]
    with (place / "printed.txt").open("w+", encoding="utf-8") as printed:
        process = subprocess.Popen(
            command, cwd=place, env=environment, stdout=printed, stderr=printed, start_new_session=True
        )
        try:
            code = process.wait()
        finally:
            # what a page starts in the background ends with it
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        printed.seek(0)
        text = printed.read()
    assert code == 0, text[-6000:]
    return text


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_laptop_tutorial_runs_as_it_stands(tmp_path):
    assert commands_of("tutorials/laptop.md").count("phalanx ") >= 6

    follow("tutorials/laptop.md", tmp_path)

    assert (tmp_path / "runs" / "first" / "report.html").is_file()
    assert (tmp_path / "model" / "tokenizer.json").is_file()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_tutorial_on_three_machines_runs_as_it_stands_and_leads_from_a_token_to_a_step(tmp_path):
    """The aim is a minute; the bound here is for a busy machine, which must not turn a test red."""
    text = follow("tutorials/three_machines.md", tmp_path)

    owner = tmp_path / "owner"
    summary = json.loads((owner / "runs" / "shared" / "summary.json").read_text())
    assert (summary["status"], summary["lost"], summary["evicted"]) == ("completed", [], [])
    assert (owner / "model" / "config.json").is_file()
    for name in ("alice", "bob"):
        told = (tmp_path / name / "terminal.txt").read_text()
        for words in (
            "the owner has reached this machine",
            "you are asked to: see hidden states",
            "serves stage",
            "is complete",
        ):
            assert words in told, told
        assert sorted(path.name for path in (owner / "pki" / name).iterdir()) == ["authority.pem", "certificate.pem"]
        assert re.search(rf"{name} +certified", text), text
    assert "the certificate of bob is revoked" in text
    first = json.loads((owner / "runs" / "shared" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["audits"] > 0
    # a token counts for a day
    told = json.loads((owner / "pki" / "invitations" / "alice.json").read_text())["expires"] - 86_400
    seconds = first["time"] - told
    assert 0 < seconds < 900
