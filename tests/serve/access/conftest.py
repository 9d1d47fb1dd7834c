"""An access directory for every test of it."""

from pathlib import Path

import pytest

from access_keys import Keys, make_access


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return make_access(tmp_path / "access")
