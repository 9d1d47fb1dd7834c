"""What several commands are tried on."""

import shutil
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "security" / "tee"))
from bare_tpm import BareTpm


@pytest.fixture
def tpm(tmp_path):
    """A software TPM of this test's own."""
    if shutil.which("swtpm") is None:
        pytest.skip("swtpm is not installed (Debian: swtpm)")
    (tmp_path / "tpm").mkdir()
    made = BareTpm(tmp_path / "tpm")
    yield made
    made.close()
