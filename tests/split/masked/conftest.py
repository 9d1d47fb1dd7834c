import pytest


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """Weights of small models, drawn once."""
    return tmp_path_factory.mktemp("masked-cache")
