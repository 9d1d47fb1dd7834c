"""Memory of the process, for tests of readers."""

import resource

import pytest


@pytest.fixture
def memory_growth():
    """How many bytes the process has grown by since the test began, at its highest."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def grown():
        return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024

    return grown
