"""Whole sessions with the enclave's own loop: training, saving, dying, coming back, leaving."""

from dataclasses import replace

import pytest
import torch
from split_house import House
from split_scene import batch_of, make_scene, same, train

from phalanx.engine import StepInputs
from phalanx.errors import (
    CheckpointError,
    FrameError,
    PeerRefusedError,
    RefusedEvidenceError,
    ReleaseRefusedError,
    RollbackError,
    SealError,
    WrongProductError,
)
from phalanx.models import build_stage, weights_digest
from phalanx.security.seal import ReleasePolicy
from phalanx.split import FrontPart, cut_model
from phalanx.split.channel import messages as say
from phalanx.split.channel.resend_window import TRIES
from phalanx.split.masked import MaskedConfig, MaskingClient, SimulatedWorker, mask_linears, process_pads
from phalanx.split.processes.local_enclave import OWNER
from phalanx.split.roles.server import EnclaveServer
from phalanx.split.training.parts import all_weights
from phalanx.testing import SplitSimulator
from phalanx.train.engines.split_engine import LocalClients, SplitEngine


def blob_of(session):
    step, number, blob = session.lead.request_state()
    return step, number, bytes(blob)


def keep_state(session):
    step, number, blob = blob_of(session)
    session.lead.settle_state(number)
    return step, blob


def test_a_session_trains_what_the_simulator_trains(source, tmp_path):
    simulator = SplitSimulator(make_scene(source))
    with House(source, tmp_path).open() as session:
        losses = [session.train_turn(number) for number in range(3)]
        measured = session.lead.measure_held_out(3, iter([batch_of(50)[0]]))
        weights = dict(session.server._trainer.trained_weights())

    assert losses == train(simulator, 3)
    assert measured == simulator.measure_held_out(*batch_of(50)[0])
    assert same(weights, simulator.copy_adapters())


def test_sealed_and_plaintext_sessions_have_the_same_digest(source, tmp_path):
    digests = []
    for mode in ("sealed", "plaintext"):
        with House(source, tmp_path / mode, mode).open() as session:
            session.train_turn(0)
            digests.append(session.lead.request_weights_digest())

    assert digests[0] == digests[1]


def test_the_digest_is_that_of_the_whole_model(source, tmp_path):
    with House(source, tmp_path).open() as session:
        session.train_turn(0)
        digest = session.lead.request_weights_digest()
        trained = {name: value.clone() for name, value in session.server._trainer.trained_weights()}
    parts = [
        build_stage(source, spec, adapter=None, activation_checkpointing=False, attention="sdpa", seed=0)
        for spec in cut_model(source.num_layers, 3)
    ]
    named = {name: value.detach() for part in parts for name, value in part.all_parameters().items()}
    # tied to the embedding, which is counted once
    named.pop("lm_head.weight")

    assert digest == weights_digest({**named, **trained}.items())


@pytest.mark.parametrize(
    "died_after", ["keeping", *(pytest.param(one, marks=pytest.mark.slow) for one in ("sealing", "settling"))]
)
def test_whenever_both_sides_die_no_kept_step_is_lost(source, tmp_path, died_after):
    undisturbed = train(SplitSimulator(make_scene(source)), 6)
    house = House(source, tmp_path)
    session = house.open()
    losses = {number: session.train_turn(number) for number in range(2)}
    step, number, kept = blob_of(session)
    session.lead.settle_state(number)
    losses |= {number: session.train_turn(number) for number in range(2, 4)}
    later_step, later_number, later = blob_of(session)
    if died_after == "settling":
        session.lead.settle_state(later_number)
    session.die()

    with house.open() as again:
        if died_after == "sealing":
            # nobody has the second state
            again.lead.restore_state(step, memoryview(kept))
        else:
            again.lead.restore_state(later_step, memoryview(later))
        begin = step if died_after == "sealing" else later_step
        losses |= {number: again.train_turn(number) for number in range(begin, 6)}

    assert [losses[number] for number in range(6)] == undisturbed


def test_a_rolled_back_altered_or_missing_state_is_refused_and_the_newest_taken(source, tmp_path):
    house = House(source, tmp_path)
    with house.open() as session:
        states = []
        for number in range(2):
            session.train_turn(number)
            states.append(blob_of(session))
            session.lead.settle_state(states[-1][1])

    with house.open() as again:
        (old_step, _, old), (new_step, _, new) = states
        with pytest.raises(RollbackError, match="enclave"):
            again.lead.restore_state(old_step, memoryview(old))
        with pytest.raises(CheckpointError):
            again.lead.restore_state(new_step, memoryview(new[:-1] + bytes([new[-1] ^ 1])))
        with pytest.raises(RollbackError, match="got none"):
            again.train_turn(0)
        again.lead.restore_state(new_step, memoryview(new))
        assert again.server._trainer.num_steps == 2


def test_only_the_owner_may_ask_for_states_and_only_clients_train(source, tmp_path):
    with House(source, tmp_path).open() as session:
        owner, client, *_ = session.lead.enclave_peers

        for asked, answer in (
            (say.StateRequest(), say.SealedState),
            (say.SettleRequest(number=1), say.SettleReply),
            (say.AdaptersRequest(), say.ReleaseEnd),
            (say.WeightsRequest(), say.WeightsReply),
        ):
            with pytest.raises(PeerRefusedError, match=f"only {OWNER}"):
                client.connection.request_answer(asked, answer)
        with pytest.raises(PeerRefusedError, match="is not a client"):
            owner.connection.request_answer(say.Upload(what="train", microbatch=0, rows=1), say.Reply, (b"x",))
        with pytest.raises(FrameError, match="not a request to"):
            client.connection.request_answer(say.EvidenceReply(), say.EvidenceReply)


FACTS = {"number": 1, "num_clients": 3, "clip_norm": 1.0, "noise_std": 0.0}


@pytest.mark.parametrize(
    "release",
    [
        {},
        {**FACTS, "surprise": "x" * 10_000},
        {name: value for name, value in FACTS.items() if name != "noise_std"},
        {**FACTS, "clip_norm": -1.0},
        {**FACTS, "noise_std": float("inf")},
        {**FACTS, "number": 2**60},
        {**FACTS, "num_clients": {"many": 1}},
    ],
)
def test_what_an_enclave_says_of_a_release_is_four_numbers_in_their_bounds(release):
    assert say.parse_message("released", {"parts": 2, "release": FACTS}).release.model_dump() == FACTS
    with pytest.raises(FrameError):
        say.parse_message("released", {"parts": 2, "release": release})


def test_a_frame_that_does_not_open_is_asked_for_again_and_at_last_refused_with_its_reason(source, tmp_path):
    with House(source, tmp_path).open() as session:
        line, nonsense = session.lead.enclave_peers[1].connection, (b"nothing sealed",)
        for attempt in range(TRIES - 1):
            upload = say.Upload(what="train", microbatch=0, rows=1, attempt=attempt)
            again, _ = line.request_answer(upload, say.ResendRequest, nonsense)
            assert again == say.ResendRequest(taken=0, attempt=attempt + 1)
        with pytest.raises(SealError) as refusal:
            line.request_answer(say.Upload(what="train", microbatch=0, rows=1, attempt=TRIES - 1), say.Reply, nonsense)

    assert refusal.value.reason == "truncated"


def test_nonsense_before_a_step_costs_nothing_of_it(source, tmp_path):
    with House(source, tmp_path).open() as session:
        session.lead.enclave_peers[1].connection.send_message(
            say.Upload(what="train", microbatch=0, rows=1), (b"nothing sealed",)
        )

        assert session.train_turn(0) == train(SplitSimulator(make_scene(source)), 1)[0]


def test_a_client_that_sends_and_sends_out_of_its_turn_is_refused_and_fills_no_memory(source, tmp_path):
    with House(source, tmp_path).open() as session:
        line = session.lead.enclave_peers[2].connection
        upload = say.Upload(what="train", microbatch=1, rows=1)
        for _ in range(8):
            line.send_message(upload, (b"x",))

        with pytest.raises(FrameError, match="8 frames are waiting"):
            line.request_answer(upload, say.Reply, (b"x",))

        assert session.train_turn(0) == train(SplitSimulator(make_scene(source)), 1)[0]


def test_a_measurement_that_is_revoked_stops_the_run_before_its_next_step(source, tmp_path):
    from phalanx.split.hardware.measure import measure_code

    code, path = measure_code().hex(), tmp_path / "policy.toml"
    text = f'allow_insecure_sim = true\nrevoked_measurements = []\n[sim]\nmeasurements.code = ["{code}"]\n'
    path.write_text(text)
    session = House(source, tmp_path, policy=str(path)).open()
    session.train_turn(0)

    path.write_text(text.replace("[]", f'["{code}"]', 1))
    with pytest.raises(RefusedEvidenceError) as refusal:
        session.train_turn(1)

    assert refusal.value.reason == "revoked"
    assert session.server._trainer.num_steps == 1
    session.die()


def test_evidence_is_asked_for_again_while_the_run_goes_on(source, tmp_path):
    with House(source, tmp_path, reattest_every=2).open() as session:
        first = [party.latest_appraisal for party in session.lead.enclave_peers]
        session.train_turn(0)
        session.train_turn(1)
        assert [party.latest_appraisal for party in session.lead.enclave_peers] == first
        session.train_turn(2)
        again = [party.latest_appraisal for party in session.lead.enclave_peers]

    assert all(one.binding.nonce != other.binding.nonce for one, other in zip(first, again, strict=True))


def test_evidence_whose_certificates_have_ended_is_asked_for_again(source, tmp_path):
    with House(source, tmp_path).open() as session:
        session.train_turn(0)
        party = session.lead.enclave_peers[1]
        first = party.latest_appraisal
        party._handshake.result = replace(first, claims=replace(first.claims, expires=first.appraised_at))
        session.train_turn(1)

        assert party.latest_appraisal.binding.nonce != first.binding.nonce
        assert party.latest_appraisal.claims.expires > first.appraised_at


def test_both_ends_sign_what_has_crossed(source, tmp_path):
    house = House(source, tmp_path)
    with house.open() as session:
        session.train_turn(0)
        agreed = session.lead.compare_transcripts(house.identities["enclave"].public)

    assert set(agreed) == {OWNER, "client-0", "client-1"}
    assert all(mine and theirs for mine, theirs in agreed.values())


def test_adapters_leave_when_the_policy_lets_them_and_stay_otherwise(source, tmp_path):
    policy = ReleasePolicy(min_clients=2, clip_norm=100.0)
    with House(source, tmp_path, release=policy).open() as session:
        with pytest.raises(ReleaseRefusedError) as refusal:
            session.lead.prepare_release()
        session.train_turn(0)
        assert not session.lead.prepare_release()
        with pytest.raises(RollbackError, match="permitted first"):
            session.lead.request_release(1)
        keep_state(session)
        permitted, tensors = session.lead.request_release(1)
        weights = {name: value.clone() for name, value in session.server._trainer.trained_weights()}

    assert refusal.value.reason == "too_few_clients"
    assert permitted["num_clients"] == 2
    assert tensors.keys() == weights.keys()
    assert all(torch.allclose(tensors[name], weights[name], atol=1e-6) for name in weights)


def release_adapters(session, step):
    """What an owner does to have adapters out; main of before had no first step."""
    session.lead.prepare_release()
    keep_state(session)
    return session.lead.request_release(step)[1]


def test_with_noise_the_owner_gets_no_digest_of_weights_that_have_none(source, tmp_path):
    policy = ReleasePolicy(min_clients=2, clip_norm=10.0, noise_multiplier=1.0)
    with House(source, tmp_path, release=policy).open() as session:
        beginning = session.lead.request_weights_digest()
        session.train_turn(0)
        after_a_step = session.lead.request_weights_digest()
        released = release_adapters(session, 1)
        after_the_release = session.lead.request_weights_digest()

    # whoever knows all texts but one could try the last one against a digest of what they make
    assert after_a_step == beginning
    assert after_the_release == weights_digest(all_weights(source, released.items()))


def test_an_owner_that_puts_back_the_state_of_before_a_release_gets_no_second_one(source, tmp_path):
    policy = ReleasePolicy(min_clients=2, clip_norm=10.0, noise_multiplier=1.0, max_releases=1)
    house = House(source, tmp_path, release=policy)
    with house.open() as session:
        session.train_turn(0)
        before = keep_state(session)
        first = release_adapters(session, 1)

        # else it has other noise, and averages it away; or one more step of one client in it, and subtracts
        with pytest.raises(RollbackError):
            session.lead.restore_state(before[0], memoryview(before[1]))
        # what has left leaves again, the same bits
        assert same(release_adapters(session, 1), first)
        session.train_turn(1)
        with pytest.raises(ReleaseRefusedError) as refusal:
            session.lead.prepare_release()

    assert refusal.value.reason == "too_many"


def begin_anew(session, settled):
    """What an owner does that has an enclave start beside its kept state: it shows none, and settles an old number."""
    session.lead.settle_state(settled)
    session.train_turn(0)


def test_an_owner_that_shows_no_state_and_settles_an_old_one_has_no_enclave_begin_anew(source, tmp_path):
    policy = ReleasePolicy(min_clients=2, clip_norm=10.0, noise_multiplier=1.0, max_releases=1)
    house = House(source, tmp_path, release=policy)
    with house.open() as session:
        session.train_turn(0)
        release_adapters(session, 1)

    with house.open() as again:
        for attack in (lambda: begin_anew(again, 1), again.lead.request_state, lambda: again.train_turn(0)):
            with pytest.raises(RollbackError, match="got none"):
                attack()


def test_without_that_check_it_has_adapters_released_again_with_other_noise(source, tmp_path, monkeypatch):
    policy = ReleasePolicy(min_clients=2, clip_norm=10.0, noise_multiplier=1.0, max_releases=1)
    house = House(source, tmp_path, release=policy)
    with house.open() as session:
        session.train_turn(0)
        first = release_adapters(session, 1)
    monkeypatch.setattr(EnclaveServer, "_check_current", lambda server: None)

    with house.open() as again:
        begin_anew(again, 1)
        second = release_adapters(again, 1)

    assert first.keys() == second.keys() and not same(first, second)


def test_a_state_that_was_never_settled_gives_no_second_release_either(source, tmp_path):
    policy = ReleasePolicy(min_clients=2, clip_norm=10.0, noise_multiplier=1.0)
    house = House(source, tmp_path, release=policy)
    with house.open() as session:
        session.train_turn(0)
        step, _, unsettled = blob_of(session)
        session.lead.prepare_release()
        # who settles an earlier state than the one that counts the release gets nothing
        session.lead.settle_state(1)
        with pytest.raises(RollbackError, match="permitted first"):
            session.lead.request_release(1)
        keep_state(session)
        session.lead.request_release(1)

        with pytest.raises(RollbackError, match="older state"):
            session.lead.restore_state(step, memoryview(unsettled))


def test_a_release_that_was_counted_before_a_crash_leaves_after_it(source, tmp_path):
    house = House(source, tmp_path, release=ReleasePolicy(min_clients=2, clip_norm=10.0, noise_multiplier=1.0))
    session = house.open()
    session.train_turn(0)
    session.lead.prepare_release()
    step, _, blob = blob_of(session)
    weights = dict(session.server._releasing._base)
    session.die()

    with house.open() as again:
        again.lead.restore_state(step, memoryview(blob))
        assert again.lead.prepare_release()
        assert same(again.lead.request_release(1)[1], weights)


def test_an_enclave_that_is_started_beside_itself_seals_and_releases_nothing(source, tmp_path):
    house = House(source, tmp_path, release=ReleasePolicy(min_clients=2, clip_norm=10.0))
    fresh, current = house.open(), house.open()
    fresh.train_turn(0)
    fresh.lead.prepare_release()
    current.train_turn(0)
    step, kept = keep_state(current)

    with house.open() as beside:
        beside.lead.restore_state(step, memoryview(kept))
        beside.train_turn(1)
        release_adapters(beside, 2)
        for session, reason in ((fresh, "got none"), (current, "runs twice")):
            with pytest.raises(RollbackError, match=reason):
                keep_state(session)
    fresh.die()
    current.die()


def test_a_client_that_says_to_send_many_rows_takes_no_memory_of_the_enclave(source, tmp_path):
    with House(source, tmp_path).open() as session:
        line, enclave = session.lead.enclave_peers[1].connection, session.server._enclave
        # rows of a model of this width are a tebibyte, which no allocator gives: the enclave's process ended
        enclave._kinds = replace(enclave._kinds, hidden=2**14, seq=2**12)
        upload = say.Upload(what="held_out", microbatch=0, rows=4096)

        again, _ = line.request_answer(upload, say.ResendRequest, (b"x",))

        assert again.taken == 0
        assert session.thread.is_alive()


def test_a_masked_session_learns_what_a_sealed_one_does_and_its_worker_sees_neither(source, tmp_path):
    class Spy(SimulatedWorker):
        seen = b""

        def multiply_masked(self, requests):
            self.seen += b"".join(request.values.tobytes() for request in requests)
            return super().multiply_masked(requests)

    worker, house = Spy(), House(source, tmp_path / "masked", "masked", masked=MaskedConfig(rows=8))
    offload = MaskingClient(worker, process_pads("run"), house.split.masked)
    house.prepare = lambda back: mask_linears(back, offload)
    with House(source, tmp_path / "sealed").open() as sealed:
        expected = [sealed.train_turn(number) for number in range(3)]

    with house.open() as session:
        found = [session.train_turn(number) for number in range(3)]

    assert found != expected
    assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in expected], rel=1e-3)
    assert len(worker.seen) > 10_000
    activations = FrontPart(source, 2)(batch_of(0)[0][0])
    assert activations.numpy().tobytes()[:16] not in worker.seen


def test_a_worker_that_lies_is_named_and_the_step_is_not_taken(source, tmp_path):
    class Liar(SimulatedWorker):
        def multiply_masked(self, requests):
            answers = super().multiply_masked(requests)
            answers[0].values[0, 0] ^= 1
            return answers

    house = House(source, tmp_path, "masked", masked=MaskedConfig(rows=8))
    offload = MaskingClient(Liar("masked-0"), process_pads("run"), house.split.masked)
    house.prepare = lambda back: mask_linears(back, offload)
    session = house.open()

    with pytest.raises(WrongProductError, match="masked-0"):
        session.train_turn(0)

    assert session.server._trainer.num_steps == 0
    session.die()


def test_each_clients_phases_are_measured_apart_and_make_up_the_steps(source, tmp_path):
    with House(source, tmp_path).open() as session:
        inputs = StepInputs(*(tuple(column) for column in zip(*batch_of(0), strict=True)), 0)
        result = SplitEngine(session.lead, LocalClients(session.lead)).train_turn(0, inputs)
        names = session.house.split.client_names

    assert set(result.party_phases) == set(names)
    assert all(report["step"] == 0 and report["measured"] for report in result.party_phases.values())
    for phase in ("front", "send", "wait", "open"):
        parts = [report["seconds"][phase] for report in result.party_phases.values()]
        assert all(seconds > 0 for seconds in parts)
        assert result.phases[phase] == pytest.approx(sum(parts))
