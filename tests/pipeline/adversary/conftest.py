import pytest
from playing import Theatre


@pytest.fixture(scope="session")
def theatre(tmp_path_factory):
    """What all schedules share."""
    return Theatre(tmp_path_factory.mktemp("adversary"))
