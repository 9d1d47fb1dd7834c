from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from real_runs import Place, end_all, make_place


@pytest.fixture(scope="session", autouse=True)
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Prepare the text and draw the model once for all runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PHALANX_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("COLUMNS", "200")
        yield


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = make_place(tmp_path)
    yield place
    end_all(place)


@pytest.fixture(scope="session")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Summary of the undisturbed run."""
    place = make_place(tmp_path_factory.mktemp("clean"))
    yield place.finish()
    end_all(place)
