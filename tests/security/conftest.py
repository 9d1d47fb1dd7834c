import pytest

from phalanx.security.crypto import create_authority


@pytest.fixture
def keys(tmp_path):
    """A directory with a fresh authority."""
    create_authority(tmp_path / "keys")
    return tmp_path / "keys"
