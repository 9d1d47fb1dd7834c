from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import real_runs
from real_runs import Place, end_all, make_place

from forked_commands import ForkedCommands


@pytest.fixture(scope="session", autouse=True)
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Prepare the text and draw the model once for all runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PHALANX_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("COLUMNS", "200")
        yield


@pytest.fixture(scope="session", autouse=True)
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
def clean(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Summary of the undisturbed run."""
    place = make_place(tmp_path_factory.mktemp("clean"))
    yield place.finish(anew=True)
    end_all(place)
