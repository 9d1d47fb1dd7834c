"""Clients of other owners: the run of one process bit for bit, sums for the owner, and what each attacker meets."""

import itertools
import math
import threading

import pytest
import torch
from remote_house import CLASSES, CLIENTS, MICROBATCHES, RemoteHouse, Texts
from split_house import House
from split_scene import same

from phalanx.engine import StepInputs
from phalanx.errors import (
    DataError,
    FailedBatchError,
    FrameError,
    PeerLostError,
    PeerRefusedError,
    RefusedEvidenceError,
    SealError,
)
from phalanx.split import ENCLAVE, SplitConfig
from phalanx.split.channel import messages as say
from phalanx.split.channel import turn_messages as ask
from phalanx.split.config import OWNER
from phalanx.split.hardware.measure import policy_of
from phalanx.split.roles.remote_lead import ScoreTotals


def inputs_of(draw):
    parts = {}
    for number in range(2):
        texts = Texts(number)
        parts.update(zip(texts.own_microbatches, texts.draw_rows(draw), strict=True))
    ids, labels, _ = zip(*(parts[at] for at in sorted(parts)), strict=True)
    return StepInputs(ids, labels, 4)


def local_run(source, directory, steps):
    """The same texts, with all clients played by one process."""
    house = House(source, directory)
    house.objective, house.classes = "classification", CLASSES
    with house.open() as session:
        taken = [session.lead.train_step(step, inputs_of(step)) for step in range(steps)]
        rows = [
            (name, *part) for number, name in enumerate(("client-0", "client-1")) for part in Texts(number).held_out()
        ]
        senders = [name for name, *_ in rows]
        scores = session.lead.measure_held_out(steps, iter([(ids, labels) for _, ids, labels, _ in rows]), senders)
        weights = {name: value.clone() for name, value in session.server._trainer.trained_weights()}
        return (
            [(one.loss, one.norm, one.num_targets) for one in taken],
            scores,
            weights,
            session.lead.request_weights_digest(),
        )


def test_remote_clients_train_and_score_what_one_process_does_bit_for_bit(source, tmp_path):
    losses, scores, weights, digest = local_run(source, tmp_path / "local", 3)

    with RemoteHouse(source, tmp_path / "remote").open() as session:
        for name in CLIENTS:
            session.join(name)
        lead = session.lead()
        taken = [lead.train_step(step, step) for step in range(3)]
        found = lead.request_scores(3)
        assert lead.request_weights_digest() == digest
        assert same(dict(session.server._trainer.trained_weights()), weights)
        statements = lead.compare_transcripts(session.house.identities[ENCLAVE].public)
        lead.end_session()
        session.wait()

    assert [(one.loss, one.norm, one.num_targets) for one in taken] == losses
    assert (found.loss, found.targets) == (scores.loss, scores.targets)
    true = [int(x) for n in range(2) for _, y, _ in Texts(n).held_out() for x in y[y >= 0]]
    assert sum(right for *_, right in found.classes) == sum(
        answer == label for answer, label in zip(scores.answers, true, strict=True)
    )
    assert set(statements) == {OWNER}
    assert list(session.failures) == []


def test_a_run_with_remote_clients_goes_on_after_all_have_died_with_equal_bits(source, tmp_path):
    losses, *_, digest = local_run(source, tmp_path / "local", 4)
    house = RemoteHouse(source, tmp_path / "remote")
    session = house.open()
    for name in CLIENTS:
        session.join(name)
    lead = session.lead()
    found = [lead.train_step(step, step) for step in range(2)]
    step, number, blob = lead.request_state()
    kept = bytes(blob)
    lead.settle_state(number)
    lead.train_step(2, 2)
    session.die()

    with house.open() as again:
        for name in CLIENTS:
            again.join(name)
        lead = again.lead()
        lead.restore_state(step, memoryview(kept))
        found += [lead.train_step(at, at) for at in (2, 3)]
        assert lead.request_weights_digest() == digest

    assert [(one.loss, one.norm, one.num_targets) for one in found] == losses


def test_a_client_that_meets_the_enclave_again_takes_no_step_of_the_others_back(source, tmp_path):
    with RemoteHouse(source, tmp_path).open() as session:
        session.join("south")
        taker, party = session.client("north")
        party.connection.send_message(session.ready())
        lead = session.lead()
        turn = threading.Thread(target=lead.train_step, args=(0, 0))
        turn.start()
        # the first microbatch of a step is its own, and all that the other one has sent would be dropped
        message, _ = party.connection.await_one_of((ask.ClientTurn,))
        with pytest.raises(FrameError, match="has met the enclave"):
            party.meet_enclave()
        taker._take_turn(message)
        turn.join(20.0)

        assert session.server._trainer.num_steps == 1


def test_the_owner_gets_sums_and_no_reply_of_a_client(source, tmp_path):
    with RemoteHouse(source, tmp_path).open() as session:
        for name in CLIENTS:
            session.join(name)
        lead = session.lead()
        heard = []
        parse = say.parse_message

        def listen(kind, body):
            heard.append(kind)
            return parse(kind, body)

        session.party(OWNER)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("phalanx.split.channel.connection.parse_message", listen)
            lead.train_step(0, 0)
        owner = lead.enclave_peers[0]
        received = session.endpoints[OWNER].bytes_received[ENCLAVE]

        assert "turn_total" in heard and not hasattr(owner, "texts")
        # evidence, a welcome, word that all are ready, three numbers: nothing of the size of a batch
        assert received < 20_000


@pytest.mark.parametrize("asked", ["evidence", "text", "texts", "labels", "upload", "drawn", "held_out"], ids=str)
def test_an_owner_that_asks_for_text_finds_no_message_for_it(asked):
    with pytest.raises(FrameError):
        say.parse_message(asked, {"step": 0, "draw": 0})
    with pytest.raises(FrameError):
        say.parse_message("turn", {"what": "train", "step": 0, "draw": 0, "texts": True})
    with pytest.raises(FrameError):
        say.parse_message("turn", {"what": "texts", "step": 0, "draw": 0})


def test_an_owner_cannot_send_what_clients_send_and_clients_cannot_ask_for_turns(source, tmp_path):
    with RemoteHouse(source, tmp_path).open() as session:
        for name in CLIENTS:
            session.join(name)
        lead = session.lead()
        owner = lead.enclave_peers[0]
        for message in (session.ready(), ask.TurnDone(step=0), ask.ClientLeft(reason="data"), ask.ConcludeReply()):
            with pytest.raises(PeerRefusedError, match="is not a client of another owner"):
                owner.connection.request_answer(message, ask.TurnTotal)
        with pytest.raises(PeerRefusedError, match="is not a client"):
            owner.connection.request_answer(say.Upload(what="train", microbatch=0, rows=1), ask.TurnTotal, (b"x",))

    with RemoteHouse(source, tmp_path / "other").open() as session:
        _, party = session.client("north")
        for message in (ask.ClientTurn(what="train", step=0, draw=0), ask.Conclude()):
            with pytest.raises(PeerRefusedError, match=f"only {OWNER} may request"):
                party.connection.request_answer(message, ask.ClientTurn)


def test_an_enclave_with_another_measurement_gets_nothing(source, tmp_path):
    other = f'allow_insecure_sim = true\n[sim]\nmeasurements.code = ["{"00" * 32}"]\n'
    (tmp_path / "policy.toml").write_text(other)
    own = SplitConfig(cut=1, allow_insecure_sim=True, policy=str(tmp_path / "policy.toml"))
    with RemoteHouse(source, tmp_path).open() as session:
        before = session.endpoints["north"].bytes_sent.get(ENCLAVE, 0)

        with pytest.raises(RefusedEvidenceError) as refusal:
            session.client("north", policy=lambda: policy_of(own))

        assert refusal.value.reason == "wrong_measurement"
        session.endpoints["north"].flush_frames(
            5.0
        )  # a frame counts once its receipt is here, and evidence may come first
        # a nonce and no more
        assert 0 < session.endpoints["north"].bytes_sent[ENCLAVE] - before < 2_000


def test_a_client_that_sends_frames_of_another_session_is_refused(source, tmp_path):
    with RemoteHouse(source, tmp_path).open() as session:
        with pytest.raises((RefusedEvidenceError, SealError)):
            session.client("north", session="session-of-yesterday")

        elsewhere = session.endpoint("south", session="session-of-yesterday")
        elsewhere.send_frame(ENCLAVE, "client_ready", session.ready().model_dump(mode="json"))
        elsewhere.flush_frames(5.0)
        assert session.endpoints[ENCLAVE].refusal_counts["south"] > 0
        assert session.server._turns.data_commitments == {}


def test_a_client_under_another_ones_name_is_refused(source, tmp_path):
    with RemoteHouse(source, tmp_path).open() as session:
        # mallory's wire proves its own name, whatever its frames say
        mallory = session.network.wire_for("mallory")
        forged = session.endpoints["north"]
        frames = []
        session.network.handles[ENCLAVE], handle = (
            lambda raw, sender: frames.append(bytes(raw)) or handle(raw, sender),
            session.network.handles[ENCLAVE],
        )
        forged.send_frame(ENCLAVE, "challenge", say.EvidenceRequest(nonce="ab" * 32).model_dump(mode="json"))
        forged.flush_frames(5.0)

        answer = mallory.deliver_frame(ENCLAVE, frames[-1], 1.0)

        assert b"is not a party of this run" in answer


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"model": "00" * 32}, "its model files differ"), ({"tokenizer": "00" * 32}, "its tokenizer differs")],
)
def test_a_client_with_another_model_or_tokenizer_does_not_take_part(source, tmp_path, changes, named):
    with RemoteHouse(source, tmp_path).open() as session:
        _, north = session.client("north")
        north.connection.send_message(session.ready())
        _, south = session.client("south")

        with pytest.raises(DataError, match=named):
            south.connection.request_answer(session.ready(**changes), ask.ClientTurn)

        assert not session.server._turns.is_ready


def test_a_turn_before_all_are_ready_or_of_another_step_is_refused(source, tmp_path):
    with RemoteHouse(source, tmp_path).open() as session:
        session.join("north")
        owner = session.party(OWNER)
        owner.connection.await_message(say.EnclaveReady)
        owner.meet_enclave()

        with pytest.raises(FrameError, match=r"[01] of 2 clients are ready"):
            owner.connection.request_answer(ask.ClientTurn(what="train", step=0, draw=0), ask.TurnTotal)

    with RemoteHouse(source, tmp_path / "other").open() as session:
        for name in CLIENTS:
            session.join(name)
        lead = session.lead()
        with pytest.raises(FrameError, match="the enclave is at step 0"):
            lead.train_step(3, 0)


def test_a_client_that_sends_without_being_asked_is_refused_and_changes_nothing(source, tmp_path):
    with RemoteHouse(source, tmp_path).open() as session:
        taker, north = session.client("north")
        ids, labels, _ = Texts(0).draw_rows(0)[0]
        taker._end.send_microbatch("train", 0, 0, ids, labels)

        with pytest.raises(FrameError, match="was asked for no microbatch"):
            north.connection.await_message(say.Reply)

        assert session.server._trainer.num_learned == 0


def test_a_client_that_is_ready_twice_neither_confuses_the_owner_nor_takes_other_texts(source, tmp_path):
    with RemoteHouse(source, tmp_path).open() as session:
        session.join("north")
        taker, south = session.client("south")
        south.connection.send_message(session.ready())
        lead = session.lead()

        with pytest.raises(FrameError, match="south: already reported ready"):
            south.connection.request_answer(session.ready(data="ee" * 32), ask.ClientTurn)

        assert session.server._turns.data_commitments["south"] == "cd" * 32
        worker = threading.Thread(
            target=lambda: taker._take_turn(south.connection.await_message(ask.ClientTurn)[0]), daemon=True
        )
        worker.start()
        # its next word is what the step came to, and no second word that all are ready
        assert lead.train_step(0, 0).num_targets == MICROBATCHES
        worker.join(120.0)


def test_a_client_that_leaves_ends_the_session_and_the_owner_is_told_who_and_why(source, tmp_path):
    with RemoteHouse(source, tmp_path).open() as session:
        session.join("north")
        _, south = session.client("south")
        south.connection.send_message(session.ready())
        lead = session.lead()
        south.connection.send_message(ask.ClientLeft(reason="stopped"))

        with pytest.raises(PeerLostError, match=r"south \(stopped\): left the run"):
            lead.train_step(0, 0)
        session.wait()

    assert any("south (stopped)" in str(one) for one in session.failures)
    assert session.server._trainer.num_steps == 0


def test_a_client_says_nothing_in_its_own_words_when_it_leaves():
    with pytest.raises(FrameError):
        say.parse_message("client_left", {"reason": "label 'plague' in line 3"})


def test_the_owner_is_told_for_whom_a_turn_waits(source, tmp_path):
    told = []

    def aside(message):
        if isinstance(message, ask.AwaitedClients):
            told.append(message.names)
            return True
        return False

    with RemoteHouse(source, tmp_path).open() as session:
        session.join("north")
        _, south = session.client("south")
        south.connection.send_message(session.ready())
        lead = session.lead(aside)
        turns, now = session.server._turns, [0.0]
        turns._clock = lambda: now[0]
        turns.begin_turn(ask.ClientTurn(what="train", step=0, draw=0), 0)

        for now[0] in (9.0, 10.0):
            session.server._tell_awaited_clients(turns)
        session.endpoints[ENCLAVE].flush_frames(5.0)
        lead.enclave_peers[0].connection.handle_unrequested()

    assert told and set(told) == {("north",)}


def test_frames_without_a_pause_keep_no_client_from_being_named(source, tmp_path, monkeypatch):
    with RemoteHouse(source, tmp_path).open() as session:
        server, frames, told = session.server, itertools.count(), []
        monkeypatch.setattr(server, "handle_message", lambda item: None)
        monkeypatch.setattr(server, "_post_message", lambda party, message: told.append((party, message)))
        server._turns._waits_for = {"south"}
        server._turns._clock = lambda: 1e9

        def busy(timeout_s):
            server._is_over = next(frames) > 20
            return object()

        monkeypatch.setattr(session.endpoints[ENCLAVE], "receive_item", busy)
        session.threads[0].join(120.0)

    assert told == [(OWNER, ask.AwaitedClients(names=("south",)))]


@pytest.mark.parametrize(
    "numbers",
    [
        [1.0, 3.0, 2.0, 2.0, 2.0, 1.0, 1.0, 2.0, 0.0, 0.0, 0.0],
        [1.0, 3.0, 3.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0],
        [-1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0],
        [math.nan, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0],
        [1.0, 1.5, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0],
    ],
)
def test_sums_that_cannot_be_are_refused(numbers):
    with pytest.raises(FrameError):
        ScoreTotals(numbers)
    assert ScoreTotals([1.0, 1.0, 1.0, 1.0, 1.0, *[0.0] * 6]).classes == ((1, 1, 1), (0, 0, 0), (0, 0, 0))


def test_a_batch_that_is_not_finite_is_given_up_and_the_next_draw_is_trained(source, tmp_path):
    with RemoteHouse(source, tmp_path).open() as session:
        for name in CLIENTS:
            session.join(name)
        lead = session.lead()
        broken = torch.full((1,), math.nan)
        name, value = next(iter(session.server._trainer.trained_parameters.items()))
        with torch.no_grad():
            kept, value.data = value.data, value.data * broken
        with pytest.raises(FailedBatchError):
            lead.train_step(0, 0)
        with torch.no_grad():
            value.data = kept
        assert lead.train_step(0, 1).loss > 0, name
