"""A gateway that many tests share."""

import sys
from pathlib import Path

import pytest

from access_keys import make_access
from machine_patience import patience_s

sys.path.append(str(Path(__file__).parent))
from running_gateway import WIDE, Lab, RunningGateway, backends
from stub_engine import Stub


@pytest.fixture(scope="session")
def shared_lab(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gateway")
    keys = make_access(folder / "access")
    key_id, secret = keys.make("alice", limits=WIDE)
    with Stub() as local, Stub() as cloud:
        # a client that sends at once has its time on a full machine too, and one that drips is cut off all the same
        client_s = patience_s(6.0)
        config = {
            "backends": backends(local, cloud),
            "health_every_s": 3600,
            "bounds": {"max_body_bytes": 262_144, "header_timeout_s": client_s, "body_timeout_s": client_s},
            "limits": {"max_completion_tokens": 512, "default_completion_tokens": 64, "max_answer_bytes": 2_000_000},
        }
        gateway = RunningGateway(folder, keys, config)
        yield Lab(gateway, local, cloud, key_id, secret)
        gateway.stop()


@pytest.fixture
def lab(shared_lab):
    shared_lab.reset()
    return shared_lab
