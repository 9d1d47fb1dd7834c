"""What a remote worker has kept on its disk comes back to an owner that was killed, and nothing else passes for it."""

import threading

import pytest
import torch

from phalanx.checkpoint.state_files import StateFiles
from phalanx.errors import CheckpointError, PhalanxError
from phalanx.pipeline import OWNER, fetch_kept
from phalanx.pipeline.protocol.mailbox import Mailbox
from phalanx.pipeline.protocol.messages import Bulk, Fault, parse_message
from phalanx.pipeline.worker.kept_states import send_kept
from phalanx.security.crypto import Identity
from phalanx.testing.endpoint import MemoryNetwork
from phalanx.transport import Endpoint, LinkFault, TransportConfig

STAGE, STEP = 1, 7


def a_state(seed=0):
    generator = torch.Generator().manual_seed(seed)
    names = ("weight/a", "weight/b", "exp_avg/a", "exp_avg/b")
    return {name: torch.randn(3, 5, generator=generator) for name in names}


@pytest.fixture
def links():
    """Endpoints of the owner and of one worker, and the worker's mail."""
    network, identities = MemoryNetwork(), {name: Identity.without_certificate(name) for name in (OWNER, "north")}
    peers = {name: identity.public for name, identity in identities.items()}
    ends = {
        name: Endpoint(identities[name], peers, "run", network.wire_for(name), TransportConfig(timeout_s=0.5))
        for name in identities
    }
    yield ends[OWNER], ends["north"], Mailbox(ends["north"])
    for end in ends.values():
        end.close()


@pytest.fixture
def ask(links):
    """Let the owner ask while a worker answers each question once."""
    owner, worker, mail = links

    def serve(answer):
        frame = None
        while frame is None or isinstance(frame, LinkFault):
            frame = worker.receive_item(5.0)
        try:
            answer(mail, parse_message(frame.kind, frame.body))
        except PhalanxError as exc:
            fault = Fault(epoch=0, about=OWNER, error=type(exc).__name__, reason=str(exc))
            mail.post_message(OWNER, fault)

    def ask(answer, patience_s=10.0):
        thread = threading.Thread(target=serve, args=(answer,))
        thread.start()
        try:
            return fetch_kept(owner, "north", STAGE, STEP, a_state(), patience_s=patience_s)
        finally:
            thread.join()

    return ask


def keeps(directory, step=STEP, party="north"):
    files = StateFiles(directory, party, pytest.fail)
    files.keep_state(STAGE, step, a_state(seed=1))
    files.close()
    return lambda mail, about: send_kept(mail.post_message, OWNER, about, directory, party)


def test_a_kept_state_comes_back_bit_for_bit(ask, tmp_path):
    found = ask(keeps(tmp_path))

    assert found.keys() == a_state().keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in a_state(seed=1).items())


def test_a_worker_that_keeps_nothing_says_what_to_do(ask):
    with pytest.raises(CheckpointError, match=r"stage 1: north has no state of step 7: .*journal = DIR"):
        ask(lambda mail, about: send_kept(mail.post_message, OWNER, about, None, "north"))


@pytest.mark.parametrize(("step", "party", "words"), [(6, "north", "cannot be read"), (5, "north", "is of step 5")])
def test_the_state_of_another_step_is_not_sent(ask, tmp_path, step, party, words):
    with pytest.raises(CheckpointError, match=words):
        ask(keeps(tmp_path, step, party))


def another_length(mail, about):
    part = Bulk(epoch=0, step=STEP, stage=STAGE, purpose="kept", offset=0, total=8)
    mail.post_message(OWNER, part, (memoryview(bytes(8)),))


def test_what_is_no_state_of_this_stage_is_refused(ask):
    with pytest.raises(CheckpointError, match="north sent a message that is not a state"):
        ask(another_length)


def other_parts(mail, about):
    for place in ({"stage": 2}, {"step": 6}, {"purpose": "state"}):
        fields = {"epoch": 0, "step": STEP, "stage": STAGE, "purpose": "kept", "offset": 0, "total": 8, **place}
        mail.post_message(OWNER, Bulk.model_validate(fields), (memoryview(bytes(8)),))


def test_nobody_waits_for_ever(ask):
    with pytest.raises(CheckpointError, match="did not send its kept state within 0 s"):
        ask(other_parts, patience_s=0.3)


def test_a_worker_that_is_gone_is_named(links):
    owner, worker, _ = links
    worker.close()

    with pytest.raises(PhalanxError, match="north"):
        fetch_kept(owner, "north", STAGE, STEP, a_state(), patience_s=20.0)
