import pytest
from made_shards import STATE, make_shard

from phalanx.checkpoint import Retention, save_checkpoint
from phalanx.security.crypto import Identity


@pytest.fixture
def owner():
    return Identity.without_certificate("owner")


@pytest.fixture
def save(tmp_path, owner):
    """Save one step of a run of three stages."""

    def save_step(step, keep=9, stages=3, state=STATE, directory=tmp_path):
        shards = (make_shard(stage, step) for stage in range(stages))
        return save_checkpoint(directory, step, shards, state, sign=owner, retention=Retention(keep))

    return save_step
