"""A worker is told by the owner alone what it holds, hides, checks, passes on and applies."""

import pytest

from phalanx.errors import FrameError
from phalanx.models import open_model
from phalanx.pipeline.protocol.message import ReceivedMessage
from phalanx.pipeline.protocol.messages import Apply, Ask, Assign, Audit, NoiseKeys, Relay, Release
from phalanx.pipeline.protocol.signed import Statements
from phalanx.pipeline.worker.party import Party
from phalanx.telemetry.phases import PhaseTimer
from phalanx.testing import tiny_run
from phalanx.train.setup.layout import make_plan


@pytest.mark.parametrize("kind", [Assign, NoiseKeys, Audit, Apply, Release, Relay, Ask])
def test_another_worker_gives_no_orders(kind, tmp_path):
    plan = make_plan(tiny_run(), open_model(tiny_run().model, tmp_path, 7))
    party = Party("worker-1", plan, lambda *told: None, Statements("run", lambda name: None), PhaseTimer())
    order = ReceivedMessage("worker-2", kind.model_construct(epoch=0), memoryview(b""), None)

    with pytest.raises(FrameError, match=f"'worker-2' sent '{kind.kind}'; only 'owner' may"):
        party.handle(order)
