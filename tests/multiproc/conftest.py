from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import real_runs
from real_runs import Place, end_all, make_place

from forked_commands import ForkedCommands


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the text is prepared and the model drawn, once for all runs."""
    return tmp_path_factory.mktemp("cache")


@contextmanager
def shared_environment(cache: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PHALANX_CACHE", str(cache))
        patch.setenv("COLUMNS", "200")
        yield


@pytest.fixture(scope="module", autouse=True)
def shared_cache(cache: Path) -> Iterator[None]:
    """Use the cache and a wide terminal while a file of this folder runs; a session's fixture would reach others."""
    with shared_environment(cache):
        yield


@pytest.fixture(scope="module", autouse=True)
def quick_commands(fork_server: ForkedCommands) -> Iterator[None]:
    """Fork the commands of all runs here; `clean`, to which runs are compared, starts from nothing."""
    real_runs.FORKED.append(fork_server)
    yield
    real_runs.FORKED.clear()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = make_place(tmp_path)
    yield place
    end_all(place)


@pytest.fixture(scope="session")
def clean(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Summary of the undisturbed run."""
    place = make_place(tmp_path_factory.mktemp("clean"))
    try:
        with shared_environment(cache):
            return place.finish(anew=True)
    finally:
        end_all(place)
