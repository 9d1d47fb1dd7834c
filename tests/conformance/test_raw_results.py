"""A raw result can be taken again: it names its command and its commit, and a page says what it means."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "benchmarks" / "results").iterdir())
PAGES = {
    path.relative_to(ROOT): path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))
}
each_result = pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
SHALLOW = ("rev-parse", "--is-shallow-repository")
NAMED = re.compile(r"[\w.-]+-cpu-2cores[\w.-]*?\.json")


def commits_of(path):
    """The commits of one file; a result of several calls has one for each."""
    commit = json.loads(path.read_text(encoding="utf-8"))["commit"]
    return list(commit.values()) if isinstance(commit, dict) else [commit]


@pytest.fixture(scope="module")
def history():
    """All commits before this one; skipped where the clone does not have them."""
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("no history here: this is no clone")
    shallow = subprocess.run([git, *SHALLOW], cwd=ROOT, capture_output=True, text=True, check=True)
    if shallow.stdout.strip() != "false":
        pytest.skip("no history here: this clone is shallow")
    log = subprocess.run([git, "rev-list", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(log.stdout.split())


@each_result
def test_a_raw_result_names_its_command(path):
    result = json.loads(path.read_text(encoding="utf-8"))

    assert re.search(r"\b(phalanx|python)\b.* \S", result["command"])
    assert result["name"]
    assert "machine" in result
    assert "load" in result


@each_result
def test_a_raw_result_is_of_a_tree_without_changes(path):
    commits = commits_of(path)

    assert commits
    assert [commit for commit in commits if not re.fullmatch(r"[0-9a-f]{40}", commit or "")] == []


@each_result
def test_the_commit_of_a_raw_result_is_in_the_history(path, history):
    assert [commit for commit in commits_of(path) if commit not in history] == []


@each_result
def test_a_page_cites_a_raw_result(path):
    assert [page for page, text in PAGES.items() if path.name in text]


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_a_raw_result_that_a_page_names_is_committed(page):
    commands = re.sub(r"```.*?```", "", PAGES[page], flags=re.DOTALL)
    names = {name for name in NAMED.findall(commands)}

    assert names <= {path.name for path in RESULTS}
