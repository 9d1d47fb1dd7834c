import pytest

from phalanx.security.tee import Binding


@pytest.fixture
def binding():
    """What the verifier of a test expects."""
    return Binding(nonce=b"\x0a" * 32, tls_key=b"\x0b" * 32, run=b"\x0c" * 32, role="server")
