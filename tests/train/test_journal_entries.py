"""What the journal notes and what of it is believed: signed by the owner, of this run, newer, whole, and not undone."""

import json
from types import SimpleNamespace

import pytest
import torch

from phalanx.checkpoint import CertifiedCheckpoints
from phalanx.checkpoint.state_files import StateFiles, state_path
from phalanx.config import canonical_json
from phalanx.errors import CheckpointError, TransportError
from phalanx.pipeline import OWNER, StateDigest
from phalanx.security.audit import AuditLog, LogHead
from phalanx.security.crypto import Identity, create_authority, digest_hex, in_domain, issue_certificate, load_identity
from phalanx.train.records.history import RunHistory
from phalanx.train.records.journal import Entry, Journal, StateFilePlace, newer_entry, read_entry, read_kept_states
from phalanx.transport.tensors import tensor_buffers

RUN, CONFIG, STEP = "ab" * 16, "cd" * 32, 4
HEAD = LogHead(7, "ef" * 32)


def digest_of(tensors, step):
    found = digest_hex(tensor_buffers(tensors["w"]))
    return StateDigest(step=step, weights=found, moments=found)


class Copy:
    """Stands for the copy of a stage: one tensor, and as many steps as were loaded."""

    def __init__(self):
        self.tensors, self.step, self.optimizer = {"w": torch.zeros(3)}, 0, self

    def state_tensors(self):
        return self.tensors

    def load_state(self, state, num_steps):
        self.tensors, self.step = dict(state), num_steps

    def compute_digest(self):
        return digest_of(self.tensors, self.step)


class Library:
    num_stages = 2

    def __call__(self, stage):
        return Copy()


def weights(stage):
    return {"w": torch.full((3,), 1.0 + stage)}


@pytest.fixture(scope="module")
def owner(tmp_path_factory):
    directory = tmp_path_factory.mktemp("keys") / "pki"
    create_authority(directory)
    return load_identity(issue_certificate(directory, OWNER))


class Desk:
    """A journal of four steps with a state of each stage beside it, and the run that it belongs to."""

    def __init__(self, directory, owner):
        self.directory, self.owner, self.given_up = directory / "journal", owner, []
        self.journal = Journal(self.directory, owner, lambda: HEAD, self.given_up.append)
        files = StateFiles(self.directory, OWNER, self.given_up.append)
        for stage in range(2):
            for step in (STEP - 1, STEP):
                files.keep_state(stage, step, weights(stage) if step == STEP else {"w": torch.zeros(3)})
        files.close()
        self.home = SimpleNamespace(journal_directory=self.directory, owner=owner, run_id=RUN)
        self.history = RunHistory(certified=CertifiedCheckpoints(), configs={CONFIG})
        self.log = SimpleNamespace(contains_head=lambda head: head == HEAD)

    def note(self, step=STEP, **changes):
        self.journal.open_step({"run": RUN, "config_digest": CONFIG, "step": step, **changes})
        self.journal.note_verified(step, {0: OWNER, 1: OWNER}, {s: digest_of(weights(s), step) for s in range(2)})
        return self

    @property
    def path(self):
        return self.directory / "journal.json"

    def read(self):
        return read_entry(self.directory, self.owner.public)

    def newer(self):
        return newer_entry(self.home, self.history, self.log)

    def collect(self, entry=None, fetch=None):
        return list(read_kept_states(self.directory, entry or self.read(), Library(), fetch))


@pytest.fixture
def desk(owner, tmp_path):
    return Desk(tmp_path, owner)


@pytest.fixture
def noted(desk):
    return desk.note()


# --- writing ---------------------------------------------------------------------------------------------------------


def test_what_was_verified_is_read_as_it_was_noted(noted):
    entry = noted.read()

    assert (entry.run, entry.config_digest, entry.step, entry.log_head) == (RUN, CONFIG, STEP, HEAD)
    assert entry.stages == {str(s): StateFilePlace(party=OWNER, digest=digest_of(weights(s), STEP)) for s in range(2)}
    assert noted.given_up == []


def test_a_step_that_was_not_opened_is_not_noted(desk):
    desk.journal.note_verified(STEP, {0: OWNER}, {})

    assert desk.read() is None


@pytest.mark.parametrize("other", [STEP - 1, STEP + 1])
def test_a_state_of_another_step_than_the_one_that_was_opened_is_not_noted(noted, other):
    noted.journal.note_verified(other, {0: OWNER}, {})

    assert noted.read().step == STEP


def test_the_last_step_takes_the_place_of_the_one_before(noted):
    noted.note(STEP + 1)

    assert noted.read().step == STEP + 1
    assert list(noted.directory.glob("*.writing")) == []


def test_a_disk_that_refuses_is_told_once_and_the_run_goes_on(desk):
    desk.path.mkdir()

    desk.note()
    desk.note(STEP + 1)

    (why,) = desk.given_up
    assert why.startswith(f"{desk.path}: ")


def test_what_is_forgotten_says_nothing_any_more_and_the_states_stay(noted):
    noted.journal.discard_entry()
    noted.journal.discard_entry()

    assert noted.read() is None
    assert state_path(noted.directory, 0, OWNER, STEP).exists()


def test_a_complete_run_leaves_nothing(noted):
    noted.journal.remove_directory()

    assert not noted.directory.exists()


# --- reading ---------------------------------------------------------------------------------------------------------


def envelope(identity, body):
    return canonical_json(
        {"body": body, **identity.signature_fields(in_domain("phalanx journal", canonical_json(body)))}
    )


def body_of(desk):
    return json.loads(desk.path.read_text())["body"]


MALFORMED = {
    "empty": lambda desk: b"",
    "no JSON": lambda desk: b"{",
    "a list": lambda desk: b"[]",
    "nothing signed": lambda desk: b"{}",
    "no signature": lambda desk: canonical_json({"body": body_of(desk)}),
    "a signature that is no text": lambda desk: canonical_json({"body": body_of(desk), "signature": 5}),
    "a signature that is no hex": lambda desk: canonical_json({"body": body_of(desk), "signature": "zz"}),
    "a body that is no object": lambda desk: envelope(desk.owner, 5),
    "a key too many": lambda desk: envelope(desk.owner, {**body_of(desk), "more": 1}),
    "a step before the first": lambda desk: envelope(desk.owner, {**body_of(desk), "step": -1}),
    "another owner's": lambda desk: envelope(Identity.without_certificate(OWNER), body_of(desk)),
    "spaces between": lambda desk: json.dumps(json.loads(desk.path.read_text())).encode(),
    "bytes that are no text": lambda desk: b"\xff\xfe",
}


@pytest.mark.parametrize("how", MALFORMED)
def test_a_file_that_the_owner_did_not_write_so_is_refused(noted, how):
    noted.path.write_bytes(MALFORMED[how](noted))

    with pytest.raises(CheckpointError, match="altered, or not signed by 'owner'"):
        noted.read()


def test_the_owners_signature_of_something_else_opens_nothing(noted):
    body = body_of(noted)
    signature = noted.owner.sign_data(in_domain("frame/1", canonical_json(body))).hex()
    noted.path.write_bytes(canonical_json({"body": body, "signature": signature}))

    with pytest.raises(CheckpointError, match="altered"):
        noted.read()


def test_a_file_that_cannot_be_read_is_an_error_and_not_an_absent_one(desk):
    desk.path.mkdir()

    with pytest.raises(CheckpointError, match="cannot be read"):
        desk.read()


def test_a_journal_of_an_earlier_version_names_no_line_of_the_log(noted):
    body = body_of(noted)
    del body["log_digest"], body["boot"]
    noted.path.write_bytes(envelope(noted.owner, body))

    assert noted.read().log_head is None
    assert noted.newer().step == STEP


# --- which one is gone on from ---------------------------------------------------------------------------------------


def saved(step):
    """The history of a run with a log that knows a checkpoint of this step."""
    certified = CertifiedCheckpoints()
    certified.follow_event("checkpoint_saved", {"step": step, "manifest": "ab" * 32, "kept": [step]})
    return RunHistory(certified=certified, configs={CONFIG})


@pytest.mark.parametrize(("checkpoint", "is_newer"), [(STEP - 1, True), (STEP, False), (STEP + 1, False)])
def test_only_a_note_after_the_newest_checkpoint_is_gone_on_from(noted, checkpoint, is_newer):
    noted.history = saved(checkpoint)

    assert (noted.newer() is not None) is is_newer


def test_without_a_journal_there_is_nothing_newer(desk):
    assert desk.newer() is None


def test_a_note_of_the_step_before_the_first_is_nothing_newer_than_the_beginning(desk):
    assert desk.note(0).newer() is None


@pytest.mark.parametrize("change", [{"run": "ba" * 16}, {"config_digest": "dc" * 32}])
def test_a_note_of_another_run_or_config_is_foreign(desk, change):
    desk.note(**change)

    with pytest.raises(CheckpointError, match="it belongs to another run or config"):
        desk.newer()


def test_a_note_under_the_run_file_of_an_earlier_session_is_not_foreign(noted):
    noted.history.configs = {CONFIG, "dc" * 32}

    assert noted.newer().step == STEP


@pytest.mark.parametrize(("undone_at", "stands"), [(HEAD.num_events, True), (HEAD.num_events + 1, False)])
def test_a_note_of_before_the_last_undoing_is_not_gone_on_from(noted, undone_at, stands):
    noted.history.undone_at = undone_at

    if stands:
        assert noted.newer().step == STEP
    else:
        with pytest.raises(CheckpointError, match="its steps were undone since"):
            noted.newer()


def test_a_note_that_knows_more_of_the_log_than_is_there_is_refused(noted, owner, tmp_path):
    with AuditLog(tmp_path / "events.jsonl", owner, RUN) as log:
        log.append_event("run_started", {})
        noted.log = log

        with pytest.raises(CheckpointError, match="the audit log lacks lines that it names"):
            noted.newer()


# --- the states ------------------------------------------------------------------------------------------------------


def test_every_stages_state_is_read_as_it_was_verified(noted):
    shards = noted.collect()

    assert [(shard.stage, shard.num_steps) for shard in shards] == [(0, STEP), (1, STEP)]
    assert [shard.tensors["w"].tolist() for shard in shards] == [[1.0] * 3, [2.0] * 3]


def flip_a_bit(desk):
    path = state_path(desk.directory, 1, OWNER, STEP)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


def put_an_older_one(desk):
    older = state_path(desk.directory, 1, OWNER, STEP - 1)
    older.replace(state_path(desk.directory, 1, OWNER, STEP))


def lose_it(desk):
    state_path(desk.directory, 1, OWNER, STEP).unlink()


def cut_it(desk):
    path = state_path(desk.directory, 1, OWNER, STEP)
    path.write_bytes(path.read_bytes()[:-2])


@pytest.mark.parametrize("spoil", [flip_a_bit, put_an_older_one, lose_it, cut_it])
def test_a_state_that_is_not_the_verified_one_is_named(noted, spoil):
    spoil(noted)

    with pytest.raises(CheckpointError, match=r"stage-1\.owner\.0\.safetensors: "):
        noted.collect()


def test_a_stage_that_the_note_leaves_out_is_named(noted):
    entry = noted.read()

    with pytest.raises(CheckpointError, match="has no entry for stage 1"):
        noted.collect(entry.model_copy(update={"stages": {"0": entry.stages["0"]}}))


def elsewhere(desk, digest=True):
    """The note, as if another machine had held the last stage."""
    entry = desk.read()
    place = StateFilePlace(party="north", digest=entry.stages["1"].digest if digest else None)
    return entry.model_copy(update={"stages": {**entry.stages, "1": place}})


def test_another_party_is_asked_for_what_it_kept_and_the_owner_for_nothing(noted):
    asked = []

    def fetch(party, stage, step, expected):
        asked.append((party, stage, step, set(expected)))
        return weights(stage)

    assert len(noted.collect(elsewhere(noted), fetch)) == 2
    assert asked == [("north", 1, STEP, {"w"})]


def test_another_state_than_the_verified_one_is_refused_and_its_party_named(noted):
    with pytest.raises(CheckpointError, match="stage 1, kept by north: differs from the verified state"):
        noted.collect(elsewhere(noted), lambda *about: weights(0))


def test_what_no_party_verified_is_not_even_asked_for(noted):
    def fetch(*about):
        raise AssertionError("asked")

    with pytest.raises(CheckpointError, match="stage 1, kept by north: the state was not verified"):
        noted.collect(elsewhere(noted, digest=False), fetch)


def test_without_a_guard_the_owners_own_disk_is_believed(noted):
    entry = noted.read()
    unverified = {name: place.model_copy(update={"digest": None}) for name, place in entry.stages.items()}

    assert len(noted.collect(entry.model_copy(update={"stages": unverified}))) == 2


def test_a_party_that_brings_nothing_is_named(noted):
    def fetch(*about):
        raise TransportError("north: no answer")

    with pytest.raises(CheckpointError, match="stage 1, kept by north: north: no answer"):
        noted.collect(elsewhere(noted), fetch)


def test_where_all_was_kept_here_the_name_of_the_party_is_only_a_name(noted):
    state_path(noted.directory, 1, OWNER, STEP).rename(state_path(noted.directory, 1, "north", STEP))

    assert len(noted.collect(elsewhere(noted))) == 2


def test_an_entry_has_no_negative_length():
    with pytest.raises(ValueError, match="num_events"):
        Entry(run=RUN, config_digest=CONFIG, step=1, num_events=-1, state={}, stages={})
