"""No (key, nonce) pair twice: through crashes at any point, restarts and rollbacks."""

import os
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sealed_pair import CLIENT, CUT, SERVER, TERMS, CountingEpochs, plain

from phalanx.errors import RollbackError
from phalanx.security.crypto import HybridSealKey
from phalanx.security.seal import (
    EpochStore,
    HandshakeOffer,
    NotRollbackProofCounter,
    answer_hello,
    epochs,
    handshake,
    keys,
)


class Crash(BaseException):
    """The process dies here."""


class ProofCounter:
    """A counter that cannot be turned back; on demand the process dies before or after it goes up."""

    rollback_proof = True

    def __init__(self, start=0):
        self.count, self.dies = start, None

    def read_count(self):
        return self.count

    def increment(self):
        if self.dies == "before":
            raise Crash
        self.count += 1
        if self.dies == "after":
            raise Crash
        return self.count


@pytest.fixture
def path(tmp_path):
    return tmp_path / "epoch.json"


@pytest.mark.parametrize("start", [0, 41])
def test_epochs_go_up_from_where_the_counter_was(path, start):
    counter = ProofCounter(start)
    store = EpochStore.create(path, counter)

    assert [store.raise_epoch(), EpochStore(path, counter).raise_epoch()] == [start + 1, start + 2]


def test_epochs_outlive_the_process_with_a_counter_in_a_file(path):
    EpochStore.create(path, NotRollbackProofCounter(path.with_name("count")))

    found = [EpochStore(path, NotRollbackProofCounter(path.with_name("count"))).raise_epoch() for _ in range(3)]

    assert found == [1, 2, 3]
    assert path.stat().st_mode & 0o077 == 0


def test_an_epoch_file_that_was_turned_back_is_refused(path):
    counter = ProofCounter()
    store = EpochStore.create(path, counter)
    store.raise_epoch()
    old = path.read_bytes()
    store.raise_epoch()

    path.write_bytes(old)

    with pytest.raises(RollbackError, match="older file was put back"):
        store.raise_epoch()


def test_an_epoch_file_that_was_deleted_is_refused(path):
    counter = ProofCounter()
    store = EpochStore.create(path, counter)
    store.raise_epoch()
    path.unlink()

    with pytest.raises(RollbackError, match="missing"):
        store.raise_epoch()
    # to set the party up once more is a person's decision, and gives no epoch twice either
    assert EpochStore.create(path, counter).raise_epoch() == 2


def test_a_counter_that_was_turned_back_is_refused(path):
    counter = ProofCounter()
    store = EpochStore.create(path, counter)
    for _ in range(3):
        store.raise_epoch()

    counter.count = 1

    with pytest.raises(RollbackError, match="counter was turned back"):
        store.raise_epoch()


def test_a_counter_that_was_turned_back_by_one_gives_no_epoch_twice(path):
    counter = ProofCounter()
    store = EpochStore.create(path, counter)
    given_before = [store.raise_epoch() for _ in range(3)]

    counter.count -= 1

    assert store.raise_epoch() not in given_before


def test_a_counter_that_somebody_else_moves_is_refused(path):
    class Shared(ProofCounter):
        def increment(self):
            super().increment()
            return super().increment()

    with pytest.raises(RollbackError, match="somebody else"):
        EpochStore.create(path, Shared()).raise_epoch()


def test_a_party_is_set_up_once(path):
    EpochStore.create(path, ProofCounter())

    with pytest.raises(RollbackError, match="once"):
        EpochStore.create(path, ProofCounter())


@pytest.mark.parametrize(
    "data", [b"", b"{}", b'{"epoch":-1}', b'{"epoch":true}', b'{"epoch":"1"}', b'{"epoch": 1}', b'{"count":1}', b"\xff"]
)
def test_a_damaged_epoch_file_is_refused_and_no_number_guessed(path, data):
    store = EpochStore.create(path, ProofCounter())
    path.write_bytes(data)

    with pytest.raises(RollbackError, match="no number is guessed"):
        store.raise_epoch()


def test_a_damaged_counter_file_is_refused(tmp_path):
    counter = NotRollbackProofCounter(tmp_path / "count")
    (tmp_path / "count").write_bytes(b"5")

    for action in (counter.read_count, counter.increment):
        with pytest.raises(RollbackError, match="damaged"):
            action()


def test_the_last_epoch_is_the_last(path):
    store = EpochStore.create(path, ProofCounter(2**32 - 2))

    assert store.raise_epoch() == 2**32 - 1
    with pytest.raises(RollbackError, match="beyond"):
        store.raise_epoch()


def test_a_directory_that_cannot_be_written_is_an_error_of_ours(tmp_path):
    (tmp_path / "file").write_bytes(b"")

    with pytest.raises(RollbackError, match="cannot be locked"):
        EpochStore.create(tmp_path / "file" / "epoch.json", ProofCounter())
    (tmp_path / "taken").mkdir()
    with pytest.raises(RollbackError, match="cannot be read"):
        NotRollbackProofCounter(tmp_path / "taken").read_count()


def test_a_counter_in_a_file_says_that_it_can_be_turned_back(tmp_path):
    assert not NotRollbackProofCounter(tmp_path / "count").rollback_proof
    assert "NOT ROLLBACK-PROOF" in NotRollbackProofCounter.__doc__


class Machine:
    """One party's machine: its files, its counter, a disk that can be restored, and how its process dies."""

    def __init__(self, directory, *, proof):
        self.path, self.count_path = directory / "epoch.json", directory / "count"
        self.counter = ProofCounter() if proof else NotRollbackProofCounter(self.count_path)
        with no_sync():
            EpochStore.create(self.path, self.counter)
        self.backups = [self.save()]

    def save(self):
        files = (self.path, self.count_path)
        return {path: path.read_bytes() for path in files if path.exists()}

    def restore(self, index, *, all_of_it):
        """Put an old disk back, or the epoch file alone."""
        backup = self.backups[index % len(self.backups)]
        if all_of_it:
            self.count_path.unlink(missing_ok=True)
        for path, data in backup.items():
            if all_of_it or path == self.path:
                path.write_bytes(data)

    def start(self, dies):
        """Raise the epoch as a process would that dies at some point, or not."""
        if isinstance(self.counter, ProofCounter):
            self.counter.dies = dies if dies in ("before", "after") else None
        try:
            with no_sync(), writes_die(dies):
                return EpochStore(self.path, self.counter).raise_epoch()
        finally:
            self.backups.append(self.save())


@contextmanager
def writes_die(dies):
    """Let the process die before or after its epoch file is replaced."""
    whole = epochs.write_number

    def dying(*arguments):
        if dies == "before_write":
            raise Crash
        whole(*arguments)
        if dies == "after_write":
            raise Crash

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(epochs, "write_number", dying)
        yield


@contextmanager
def no_sync():
    """Processes die here and machines do not, so nothing has to be forced to disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


starts = st.tuples(st.just("start"), st.sampled_from([None, "before", "after", "before_write", "after_write"]))
rollbacks = st.tuples(st.just("rollback"), st.tuples(st.integers(0, 50), st.booleans()))
schedules = st.lists(starts | rollbacks, max_size=12)


@settings(max_examples=3 * settings.default.max_examples, deadline=None)
@given(schedules)
def test_with_a_counter_that_holds_no_epoch_is_given_twice_whatever_happens_to_the_disk(schedule):
    with TemporaryDirectory() as name:
        machine, found = Machine(Path(name), proof=True), []
        for action, about in schedule:
            if action == "rollback":
                machine.restore(about[0], all_of_it=about[1])
                continue
            with suppress(Crash, RollbackError):
                found.append(machine.start(about))

        assert found == sorted(set(found))


@settings(deadline=None)
@given(st.lists(starts, max_size=12))
def test_whatever_crashes_alone_leave_behind_never_stops_a_party(schedule):
    with TemporaryDirectory() as name:
        machine = Machine(Path(name), proof=True)
        for _, dies in schedule:
            with suppress(Crash):
                machine.start(dies)

        assert machine.start(None) == machine.counter.read_count()


class NoncesUsed:
    """Stands in the place of AES-GCM and notes every key with every nonce."""

    used: set
    cipher = keys.AESGCM

    def __init__(self, key):
        self._key, self._cipher = bytes(key), self.cipher(key)

    def encrypt_into(self, nonce, data, about, out):
        if (self._key, nonce) in self.used:
            raise AssertionError("a nonce was used twice")
        self.used.add((self._key, nonce))
        return self._cipher.encrypt_into(nonce, data, about, out)


@contextmanager
def nonces_noted():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NoncesUsed, "used", set(), raising=False)
        patch.setattr(keys, "AESGCM", NoncesUsed)
        yield NoncesUsed.used


def session(machine, dies, frames):
    """A client that starts, shakes hands, sends some frames, and is gone; return its epoch."""

    class Source:
        def raise_epoch(self):
            return machine.start(dies)

    offer = HandshakeOffer(TERMS, CLIENT, Source())
    reply, server = answer_hello(offer.hello, TERMS, SERVER, CountingEpochs(), CLIENT.public)
    client = offer.accept_reply(reply, SERVER.public)
    for step in range(frames):
        client.sender.seal_tensor(CUT, step, 0, plain(step))
        server.sender.seal_tensor(CUT, step, 0, plain(step))
    return client.sender.sender_epoch


busy_schedules = st.lists(st.tuples(starts, st.integers(0, 3)) | st.tuples(rollbacks, st.just(0)), max_size=10)


def play(schedule, *, proof, run):
    """Let a machine go through a schedule; return how many chunks were sealed."""
    with TemporaryDirectory() as name:
        machine, sealed = Machine(Path(name), proof=proof), 0
        for (action, about), frames in schedule:
            if action == "rollback":
                machine.restore(about[0], all_of_it=about[1])
                continue
            with suppress(Crash, RollbackError):
                run(machine, about, frames)
                sealed += frames * 2 * 3
        return sealed


@settings(deadline=None)
@given(busy_schedules)
def test_no_nonce_is_used_twice_even_where_the_whole_disk_is_turned_back(schedule):
    with nonces_noted() as used:
        sealed = play(schedule, proof=False, run=session)

        assert len(used) == sealed


@settings(deadline=None)
@given(busy_schedules)
def test_no_nonce_is_used_twice_even_where_nothing_is_random(schedule):
    """Salts, shares and sessions repeat: what is left is the epoch, on a counter that holds, at both ends."""
    server_epochs = CountingEpochs()

    def run(machine, dies, frames):
        stuck_session(machine.start(dies), server_epochs.raise_epoch(), frames)

    with nonces_noted() as used, nothing_random():
        sealed = play(schedule, proof=True, run=run)

        assert len(used) == sealed


def test_a_whole_disk_that_was_turned_back_repeats_an_epoch_and_no_key(tmp_path):
    machine, given_epochs = Machine(tmp_path, proof=False), []
    with nonces_noted() as used:
        for _ in range(2):
            machine.restore(0, all_of_it=True)
            given_epochs.append(session(machine, None, 1))

        assert given_epochs == [1, 1]
        assert len(used) == 2 * 2 * 3


@pytest.mark.slow
@settings(max_examples=10_000, deadline=None)
@given(busy_schedules)
def test_no_nonce_is_used_twice_in_ten_thousand_schedules(schedule):
    with nonces_noted() as used:
        sealed = play(schedule, proof=False, run=session)

        assert len(used) == sealed


@contextmanager
def nothing_random():
    """Take the fresh numbers out of handshakes."""
    private = HybridSealKey.from_bytes(b"\x07" * 96)
    encapsulated = private.lattice.public_key().encapsulate()

    class Same:
        generate = staticmethod(lambda: private)

    class SameCurve:
        generate = staticmethod(lambda: private.curve)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handshake.secrets, "token_bytes", bytes)
        patch.setattr(handshake, "HybridSealKey", Same)
        patch.setattr(handshake, "X25519PrivateKey", SameCurve)
        patch.setattr(handshake, "_encapsulate", lambda key: encapsulated)
        yield


def stuck_session(client_epoch, server_epoch, frames):
    class Given:
        def __init__(self, epoch):
            self.raise_epoch = lambda: epoch

    offer = HandshakeOffer(TERMS, CLIENT, Given(client_epoch))
    reply, server = answer_hello(offer.hello, TERMS, SERVER, Given(server_epoch), CLIENT.public)
    client = offer.accept_reply(reply, SERVER.public)
    for step in range(frames):
        client.sender.seal_tensor(CUT, step, 0, plain(step))
        server.sender.seal_tensor(CUT, step, 0, plain(step))


def test_where_epochs_and_salts_repeat_the_watch_on_nonces_finds_it():
    with nonces_noted(), nothing_random(), pytest.raises(AssertionError, match="twice"):
        for _ in range(2):
            stuck_session(1, 1, 1)
