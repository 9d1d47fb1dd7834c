import pytest
from bare_tpm import BareTpm, missing_swtpm

from phalanx.security.tee import Binding


@pytest.fixture
def binding():
    """What the verifier of a test expects."""
    return Binding(nonce=b"\x0a" * 32, tls_key=b"\x0b" * 32, run=b"\x0c" * 32, role="server")


@pytest.fixture
def bare_tpm(tmp_path):
    """A software TPM of this test's own; skipped where swtpm is not installed."""
    if missing_swtpm():
        pytest.skip("swtpm is not installed (Debian: swtpm)")
    made = BareTpm(tmp_path)
    yield made
    made.close()


@pytest.fixture
def device(bare_tpm):
    """A connection to it."""
    with bare_tpm.open() as made:
        yield made
