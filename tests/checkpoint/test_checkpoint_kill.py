import multiprocessing
import random
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from made_shards import STATE, make_shard

from phalanx.checkpoint import Retention, latest_checkpoint, open_checkpoint, save_checkpoint
from phalanx.security.crypto import Identity

KEY = bytes(range(32))


def identity():
    return Identity("owner", Ed25519PrivateKey.from_private_bytes(KEY))


def write_until_killed(directory, first, started):
    """Save step after step, every second one twice, so that a kill meets writing, renaming and pruning."""
    owner = identity()
    for step in range(first, first + 100_000):
        for _ in range(1 + step % 2):
            shards = (make_shard(stage, step) for stage in range(3))
            save_checkpoint(Path(directory), step, shards, STATE, sign=owner, retention=Retention(2))
        started.set()


@pytest.fixture(scope="module")
def server():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["phalanx.checkpoint.save", "torch"])
    return context


def test_kill_at_any_moment_never_spoils_the_last_good_checkpoint(tmp_path, server):
    rng = random.Random(20)
    step = 0
    for _ in range(12):
        started = server.Event()
        writer = server.Process(target=write_until_killed, args=(str(tmp_path), step + 1, started))
        writer.start()
        assert started.wait(timeout=60)
        writer.join(timeout=rng.uniform(0.0, 0.03))
        writer.kill()
        writer.join()
        writer.close()

        checkpoint = open_checkpoint(
            latest_checkpoint(tmp_path), identity().public, run="demo", config_digest="ab" * 32
        )

        assert checkpoint.step >= step + 1
        step = checkpoint.step
        for stage in range(3):
            expected = make_shard(stage, step).tensors
            loaded = checkpoint.stage_tensors(stage)
            assert all(loaded[name].equal(expected[name]) for name in expected)
