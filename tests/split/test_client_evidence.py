"""Sessions in which the enclave wants a client's evidence: what is trained, what is refused, what the owner hears."""

import pytest
from remote_house import CLIENTS, RemoteHouse, Texts

from phalanx.errors import FrameError, PeerLostError, RefusedEvidenceError
from phalanx.security.tee import SimAttester
from phalanx.split import ENCLAVE
from phalanx.split.channel import messages as say
from phalanx.split.channel import turn_messages as ask
from phalanx.split.config import OWNER
from phalanx.split.hardware.measure import measure_code


def policies(*names, code=None):
    measurements = {"code": (code or measure_code().hex(),)}
    return {name: {"allow_insecure_sim": True, "sim": {"measurements": measurements}} for name in names}


class Heard:
    """What the enclave has told the owner of clients' evidence."""

    def __init__(self):
        self.words = []

    def __call__(self, message):
        if isinstance(message, ask.ClientAppraised | ask.ClientEvidenceRefused):
            self.words.append(message)
            return True
        return False

    @property
    def summary_fields(self):
        return [(one.kind, one.client, getattr(one, "reason", "")) for one in self.words]


def without(binding):
    """Evidence of nothing."""
    return b""


def of_a_changed_program(session, name):
    attester = SimAttester(session.house.identities[name], b"\x09" * 32)
    return lambda binding: attester.make_evidence(binding).to_bytes()


def run(source, directory, steps, **given):
    heard = Heard()
    with RemoteHouse(source, directory, **given).open() as session:
        for name in CLIENTS:
            session.join(name)
        lead = session.lead(heard)
        losses = [(one.loss, one.norm) for one in (lead.train_step(step, step) for step in range(steps))]
        found = losses, lead.request_scores(steps).classes, lead.request_weights_digest()
        lead.compare_transcripts(session.house.identities[ENCLAVE].public)
        lead.end_session()
        session.wait()
    assert list(session.failures) == []
    return found, heard.summary_fields


def test_clients_that_bring_evidence_train_the_bits_of_clients_that_bring_none(source, tmp_path):
    expected, silence = run(source, tmp_path / "without", 3)

    found, told = run(source, tmp_path / "with", 3, client_policies=policies(*CLIENTS))

    assert found == expected
    assert silence == []
    assert sorted(told) == [("client_appraised", name, "") for name in CLIENTS]


def test_the_owner_hears_which_client_was_appraised_by_which_policy_before_the_first_turn(source, tmp_path):
    heard = Heard()
    with RemoteHouse(source, tmp_path, client_policies=policies("south")).open() as session:
        for name in CLIENTS:
            session.join(name)
        session.lead(heard)

        (word,) = heard.words
    assert (word.client, word.evidence, word.measurements) == ("south", "sim", {"code": measure_code().hex()})
    assert len(word.policy) == 64


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda session: without, "missing_evidence"),
        (lambda session: of_a_changed_program(session, "south"), "wrong_measurement"),
    ],
    ids=["none", "another program"],
)
def test_a_client_whose_evidence_does_not_pass_has_no_link_and_nothing_of_it_is_taken(source, tmp_path, make, reason):
    heard = Heard()
    with RemoteHouse(source, tmp_path, client_policies=policies(*CLIENTS)).open() as session:
        session.join("north")
        owner = session.party(OWNER, aside=heard)
        owner.connection.await_message(say.EnclaveReady)
        owner.meet_enclave()
        with pytest.raises(RefusedEvidenceError) as refusal:
            session.client("south", proves=make(session))
        assert refusal.value.reason == reason
        south = session.party("south")
        for message in (say.Upload(what="train", microbatch=1, rows=1), session.ready()):
            with pytest.raises((RefusedEvidenceError, FrameError)):
                south.connection.request_answer(message, say.Reply, (b"x",))
        session.endpoints[ENCLAVE].flush_frames(5.0)
        owner.connection.handle_unrequested()

        assert session.server._trainer.num_learned == 0
        assert not session.server._turns.is_ready
    assert ("client_evidence_refused", "south", reason) in heard.summary_fields


def test_an_owner_that_has_not_met_the_enclave_yet_hears_of_a_refusal_when_the_session_ends_with_it(source, tmp_path):
    heard = Heard()
    with RemoteHouse(source, tmp_path, client_policies=policies(*CLIENTS)).open() as session:
        owner = session.party(OWNER, aside=heard)
        owner.connection.await_message(say.EnclaveReady)
        session.join("north")
        with pytest.raises(RefusedEvidenceError):
            session.client("south", proves=without)
        session.party("south").connection.send_message(ask.ClientLeft(reason="evidence"))

        with pytest.raises(PeerLostError, match=r"south \(evidence\)"):
            owner.connection.await_message(say.EvidenceReply)

    # of evidence that has passed nothing is said to an owner that does not know to whom it listens
    assert heard.summary_fields == [("client_evidence_refused", "south", "missing_evidence")]


def test_the_same_clients_take_part_where_the_run_file_has_no_policy_for_them(source, tmp_path):
    with RemoteHouse(source, tmp_path).open() as session:
        session.join("north", proves=without)
        session.join("south", proves=of_a_changed_program(session, "south"))

        assert session.lead().train_step(0, 0).loss > 0


def test_a_client_that_was_let_in_and_then_brings_worse_evidence_is_let_out(source, tmp_path):
    with RemoteHouse(source, tmp_path, client_policies=policies("south")).open() as session:
        session.join("north")
        taker, south = session.client("south")
        south.connection.send_message(session.ready())
        session.lead(Heard())
        south._handshake._make_evidence = of_a_changed_program(session, "south")

        with pytest.raises(RefusedEvidenceError):
            south.appraise_again()
        session.server._turns.begin_turn(ask.ClientTurn(what="train", step=0, draw=0), 0)
        ids, labels, _ = Texts(1).draw_rows(0)[0]
        taker._end.send_microbatch("train", 0, 1, ids, labels)
        with pytest.raises(RefusedEvidenceError, match="must send accepted evidence"):
            south.connection.await_message(say.Reply)

        assert session.server._trainer.num_learned == 0


def test_new_evidence_is_brought_as_often_as_the_run_says(source, tmp_path):
    expected, _ = run(source, tmp_path / "never", 4)

    found, told = run(source, tmp_path / "often", 4, client_policies=policies("north"), reattest_every=2)

    assert found == expected
    assert told == [("client_appraised", "north", "")] * 2


def test_a_client_that_does_not_bring_new_evidence_in_time_is_refused(source, tmp_path, monkeypatch):
    given = {"client_policies": policies("south"), "reattest_every": 1}
    with RemoteHouse(source, tmp_path, **given).open() as session:
        session.join("north")
        taker, south = session.client("south")
        south.connection.send_message(session.ready())
        lead = session.lead(Heard())
        # an appraisal that passed once is all that this client ever shows
        monkeypatch.setattr(south, "check_trust", lambda **times: None)
        owner = lead.enclave_peers[0]
        owner.connection.send_message(ask.ClientTurn(what="train", step=0, draw=0))
        taker._take_turn(south.connection.await_message(ask.ClientTurn)[0])
        owner.connection.await_message(ask.TurnTotal)
        owner.connection.send_message(ask.ClientTurn(what="train", step=1, draw=1))

        with pytest.raises(RefusedEvidenceError, match="must send accepted evidence"):
            taker._take_turn(south.connection.await_message(ask.ClientTurn)[0])

        assert session.server._trainer.num_steps == 1


def test_without_policies_a_handshakes_messages_have_the_bytes_that_they_had():
    assert say.EvidenceReply().model_dump(mode="json") == {}
    assert say.HandshakeCall(token_bytes=0).model_dump(mode="json") == {"token_bytes": 0}
    assert say.EvidenceReply(nonce="ab" * 32).model_dump(mode="json") == {"nonce": "ab" * 32}
    assert say.HandshakeCall(token_bytes=3, evidence_bytes=4).model_dump(mode="json") == {
        "token_bytes": 3,
        "evidence_bytes": 4,
    }
