import pytest
from play import Stage


@pytest.fixture(scope="session")
def stage(tmp_path_factory):
    """What all schedules share."""
    return Stage(tmp_path_factory.mktemp("fuzz"))
