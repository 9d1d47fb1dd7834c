import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from forked_commands import ForkedCommands
from forked_workers import forked_workers
from phalanx.lab.attacks import attackers_of
from phalanx.train import RunConfig, StagedRun, load_run, train
from tiny_run_file import tiny_run_file

TINY = tiny_run_file("""
# the owner alone: no worker processes
[pipeline]
stages = 2

[checkpoint]
every = 2
# a stopped run goes on from its checkpoint; see test_journal.py
journal = false
""")

MakeRun = Callable[..., RunConfig]


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def quick_workers(fork_server: ForkedCommands) -> Iterator[None]:
    """Fork the workers of a test's runs; tests of other folders, in the same process, see nothing of it."""
    with forked_workers(fork_server):
        yield


@pytest.fixture(autouse=True)
def shared_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepare the text and draw the model once for all tests."""
    monkeypatch.setenv("PHALANX_CACHE", str(cache))


@pytest.fixture(scope="session")
def trained_once(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """Summary and directory of an undisturbed run; not to be changed."""
    home = tmp_path_factory.mktemp("trained")
    (home / "tiny.toml").write_text(TINY)
    text = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PHALANX_CACHE", str(cache))
        summary = train(load_run(home / "tiny.toml"), home / "run", console=Console(file=text, width=200))
    return {**summary, "shown": text.getvalue()}, home / "run"


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


@pytest.fixture
def make_run(run_file: Path) -> MakeRun:
    return lambda *overrides: load_run(run_file, overrides)


@pytest.fixture
def quietly() -> Callable[..., dict[str, Any]]:
    """Train without filling the screen; what would have been shown is in `shown`."""

    def run(run: RunConfig, directory: Path, **options: Any) -> dict[str, Any]:
        text = io.StringIO()
        if isinstance(run, StagedRun) and run.attack.kind != "none":
            options = {"open_workers": attackers_of(run.attack), **options}
        summary = train(run, directory, console=Console(file=text, width=200), **options)
        return {**summary, "shown": text.getvalue()}

    return run
