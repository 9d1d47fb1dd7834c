from types import SimpleNamespace

import pytest

from phalanx.security.crypto import Identity
from phalanx.testing.endpoint import MemoryNetwork
from phalanx.transport import Endpoint, TransportConfig

LIMITS = TransportConfig(timeout_s=5.0, max_frame_bytes=2 * 1024 * 1024, max_queued_bytes=4 * 1024 * 1024)


@pytest.fixture
def parties():
    """Make endpoints on one memory network; closes them all."""
    network = MemoryNetwork()
    identities = {name: Identity.without_certificate(name) for name in ("owner", "worker", "mallory")}
    peers = {name: identity.public for name, identity in identities.items()}
    endpoints = []

    def make(name, limits=LIMITS, wire=None):
        endpoint = Endpoint(identities[name], peers, "run-1", wire or network.wire_for(name), limits)
        endpoints.append(endpoint)
        return endpoint

    yield SimpleNamespace(make=make, network=network, identities=identities, peers=peers)
    for endpoint in endpoints:
        endpoint.close()
