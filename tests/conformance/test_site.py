"""The documentation as a site: every page is in it, it builds without a warning, and reading it fetches nothing."""

import importlib.util
import os
import re
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


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_laptop_tutorial_runs_as_it_stands(tmp_path):
    script = commands_of("tutorials/laptop.md")
    assert script.count("phalanx ") >= 6
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PHALANX_CACHE": str(tmp_path / "cache"),
    }

    done = subprocess.run(
        ["/bin/bash", "-euo", "pipefail", "-c", script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert (tmp_path / "runs" / "first" / "report.html").is_file()
    assert (tmp_path / "model" / "tokenizer.json").is_file()
