"""The simulator that users' own tests stand on."""

import pytest
import torch

from phalanx.data import IGNORE
from phalanx.errors import ConfigError
from phalanx.pipeline.protocol.messages import Activation, Commit, UpdateReport
from phalanx.testing import (
    Actor,
    MemoryCompany,
    OutgoingMessage,
    crash_at,
    random_batch,
    rewrite_only,
    tampering,
    tiny_run,
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


def test_two_simulations_of_one_run_end_with_the_same_bits_and_other_keys(tmp_path, cache):
    digests, keys = [], []
    for name in ("one", "other"):
        with MemoryCompany(tiny_run(), tmp_path / name, cache=cache) as company:
            company.run(2)
            digests.append(company.weights_digest())
            keys.append(company.party_identity("worker-1").public)

    assert digests[0] == digests[1]
    assert keys[0] != keys[1]


def test_steps_go_on_where_the_last_call_ended(tmp_path, cache):
    with MemoryCompany(tiny_run(3), tmp_path, cache=cache) as company:
        steps = [result.step for count in (1, 2) for result in company.run(count)]

    assert steps == [0, 1, 2]


def test_everybody_goes_home_at_the_end(tmp_path, cache):
    with MemoryCompany(tiny_run(), tmp_path, cache=cache) as company:
        assert company.is_worker_alive("worker-1")

    assert not company.is_worker_alive("worker-1")
    assert not company.is_worker_alive("worker-2")
    assert company.errors == {}


def test_an_actor_for_nobody_is_refused(tmp_path, cache):
    with pytest.raises(ConfigError, match=r"worker-7.*worker-1, worker-2"):
        MemoryCompany(tiny_run(), tmp_path, {"worker-7": Actor()}, cache=cache)


def test_an_honest_actor_is_no_actor(tmp_path, cache):
    digests = []
    for name, actors in (("bare", {}), ("acted", {"worker-1": Actor(tampering())})):
        with MemoryCompany(tiny_run(3), tmp_path / name, actors, cache=cache) as company:
            company.run(2)
            digests.append(company.weights_digest())

    assert digests[0] == digests[1]


def test_letters_can_be_delayed_and_the_step_still_ends(tmp_path, cache):
    held = []

    def first_one_late(outgoing, message):
        if message.direction != "forward":
            return [outgoing]
        held.append(outgoing)
        if message.microbatch == 0:
            return []
        leaving, held[:] = list(held), []
        return leaving

    actor = Actor(rewrite=rewrite_only(Activation, first_one_late))
    with MemoryCompany(tiny_run(4), tmp_path, {"worker-1": actor}, cache=cache) as company:
        results = company.run(2)

    assert [result.guard.attempts for result in results] == [1, 1]


def test_a_rewrite_of_one_kind_sees_no_other(tmp_path, cache):
    seen = []

    def note(outgoing, message):
        seen.append(message.kind)
        return [outgoing]

    with MemoryCompany(
        tiny_run(3), tmp_path, {"worker-1": Actor(rewrite=rewrite_only(Commit, note))}, cache=cache
    ) as company:
        company.run(2)

    assert seen == ["commit", "commit"]


def test_a_killed_worker_is_dead_and_the_run_is_not(tmp_path, cache):
    with MemoryCompany(tiny_run(), tmp_path, cache=cache) as company:
        company.run(1)
        company.kill_worker("worker-2")
        company.run(1)

        assert not company.is_worker_alive("worker-2")
        assert company.lost == ["worker-2"]


def test_a_crash_can_be_in_a_backward_pass(tmp_path, cache):
    with MemoryCompany(tiny_run(3), tmp_path, {"worker-1": Actor(crash_at(1, 2, "backward"))}, cache=cache) as company:
        results = company.run(2)

    assert [result.guard.attempts for result in results] == [1, 2]


def test_a_wrap_is_told_which_copies_are_held_and_of_a_promotion_too(tmp_path, cache):
    seen = []

    def note(copy, held):
        seen.append((copy.spec.index, held))
        return copy

    actors = {"worker-1": Actor(crash_at(1)), "worker-2": Actor(note)}
    with MemoryCompany(tiny_run(), tmp_path, actors, cache=cache) as company:
        company.run(2)

    assert seen == [(1, False), (2, True), (1, True)]


def test_a_letter_to_oneself_is_signed_for_the_books_and_not_sent(tmp_path, cache):
    def keep_another(outgoing, message):
        own = OutgoingMessage("worker-1", message, bytes(len(outgoing.payload)))
        return [outgoing, own] if (message.step, message.direction) == (1, "forward") else [outgoing]

    actors = {"worker-1": Actor(rewrite=rewrite_only(Activation, keep_another))}
    with MemoryCompany(tiny_run(), tmp_path, actors, cache=cache) as company:
        company.run(2)

    # the commitment speaks of the zeros that were signed last, the link of what was sent
    assert [(v.party, v.step, v.offence) for v in company.verdicts] == [("worker-1", 1, "equivocation")]
    assert company.event_bodies("fault") == []


def test_a_letter_can_be_given_other_words(tmp_path):
    outgoing = OutgoingMessage("owner", UpdateReport(epoch=0, step=1, states={}, usage={}, bytes_sent={}), b"x")

    changed = outgoing.with_fields({"step": 2})

    assert (changed.message.step, changed.receiver, changed.payload) == (2, "owner", b"x")
    assert outgoing.message.step == 1


def test_batches_depend_on_seed_and_step_only():
    run = tiny_run()

    batch = random_batch(run, 64, 5)

    assert torch.equal(batch.input_ids, random_batch(run, 64, 5).input_ids)
    assert not torch.equal(batch.input_ids, random_batch(run, 64, 6).input_ids)
    assert torch.equal(batch.labels[1:, :-1], batch.input_ids[1:, 1:]), "labels are the next tokens"
    assert batch.labels[0, :2].tolist() == [IGNORE, IGNORE]
    assert int(batch.input_ids.max()) < 64
