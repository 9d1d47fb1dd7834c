"""Faults that are injected into real runs, and the cause that the card of each run names; the rest of the twelve and
more are in `tests/multiproc/test_post_mortems.py`, where they need processes of their own.
"""

import signal
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
import torch

from phalanx.data import BatchLoader
from phalanx.data.batch import IGNORE
from phalanx.errors import AuditLogError, CertificateError, DataError
from phalanx.security.crypto import create_authority, issue_certificate
from phalanx.train import load_run
from phalanx.watch.post_mortem import make_card
from tiny_dataset import write_tiny_dataset
from tiny_run_file import tiny_run_file

ALONE = "[pipeline]\nstages = 2\n[checkpoint]\nevery = 2\njournal = false\n"
BPE = 'tokenizer = { kind = "bpe", vocab_size = 300 }\n'
TEXTS = [f"The number {number} comes after {number - 1} and before {number + 1}." for number in range(60)]


@pytest.fixture
def make_alone(tmp_path):
    def make(*overrides, sections=ALONE, replacing=None, **sizes):
        text = tiny_run_file(sections, **sizes)
        for old, new in (replacing or {}).items():
            assert old in text
            text = text.replace(old, new)
        (tmp_path / "alone.toml").write_text(text)
        return load_run(tmp_path / "alone.toml", overrides)

    return make


def change_batches(monkeypatch, change):
    """Have the data hold other batches at some places: `change(place, batch)`."""
    honest = BatchLoader.next_batch

    def give(self):
        place = self.position_state()["num_samples"] // 8
        return change(place, honest(self))

    monkeypatch.setattr(BatchLoader, "next_batch", give)


@pytest.fixture
def terminal():
    """Python's own handler of Ctrl-C, whatever a test before has left behind."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("terminal")
def test_ctrl_c_in_the_middle_of_a_run(make_alone, quietly, tmp_path):
    summary = quietly(
        make_alone(), tmp_path / "run", on_validation=lambda _step, _result: signal.raise_signal(signal.SIGINT)
    )

    card = make_card(tmp_path / "run")
    assert summary["status"] == "interrupted"
    assert card.cause == "interrupted"
    assert card.next_command.endswith("--resume")


@pytest.mark.usefixtures("terminal")
def test_an_audit_log_that_was_altered_between_two_sessions(make_alone, quietly, tmp_path):
    run = make_alone()
    quietly(run, tmp_path / "run", on_validation=lambda _step, _result: signal.raise_signal(signal.SIGINT))
    log = tmp_path / "run" / "events.jsonl"
    log.write_text(log.read_text().replace('"step":2', '"step":1', 1).replace('"step": 2', '"step": 1', 1))

    with pytest.raises(AuditLogError):
        quietly(run, tmp_path / "run", resume=True)

    assert make_card(tmp_path / "run").cause == "altered_log"


def test_a_shard_with_one_wrong_bit(make_alone, quietly, tmp_path):
    home = tmp_path / "dataset"
    write_tiny_dataset(home, {"counted": TEXTS})
    shard = home / "shards" / "counted.train" / "tokens-00000"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    sources = {
        'sources = [{ kind = "python_manual" }]\n': f'dataset = {{ path = "{home}" }}\n',
        BPE: BPE.replace('"bpe", vocab_size = 300', f'"file", path = "{home}/tokenizer.json"'),
        "validation_share = 0.2\nmax_documents = 12\n": "",
    }

    with pytest.raises(DataError):
        quietly(make_alone(replacing=sources), tmp_path / "run")

    assert make_card(tmp_path / "run").cause == "bad_data"


def test_planted_batches_without_the_defence_end_as_a_divergence(make_alone, quietly, tmp_path, monkeypatch):
    """Batches of one token that teach another one: with `train.stability` they are passed (`test_stability.py`)."""
    taught = {**dict.fromkeys(range(4, 15), 260), 15: 261}
    change_batches(
        monkeypatch,
        lambda place, batch: (
            replace(
                batch,
                input_ids=torch.full_like(batch.input_ids, 7),
                labels=torch.full_like(batch.labels, taught[place]),
            )
            if place in taught
            else batch
        ),
    )
    settings = ('optimizer.kind="sgd"', "optimizer.lr=0.5", "optimizer.clip_norm=1e9")
    ranks = "[parallel]\ndp = 1\n[checkpoint]\nevery = 5\n"

    summary = quietly(make_alone(*settings, sections=ranks, steps=16, validate_every=0), tmp_path / "run")

    card = make_card(tmp_path / "run")
    assert summary["status"] == "completed"
    assert card.cause == "diverged"
    assert "--from-step" in card.next_command


def test_a_batch_without_any_target_is_given_up(make_alone, quietly, tmp_path, monkeypatch):
    """The mean over nothing is no number, in the loss and in every gradient."""
    change_batches(
        monkeypatch,
        lambda place, batch: batch if place != 3 else replace(batch, labels=torch.full_like(batch.labels, IGNORE)),
    )

    quietly(make_alone(), tmp_path / "run")

    card = make_card(tmp_path / "run")
    assert card.cause == "nan_batch"
    assert card.lost == "1 batches were given up"


def test_a_certificate_of_the_owner_that_has_expired(make_alone, quietly, tmp_path):
    keys, now = tmp_path / "keys", datetime.now(UTC)
    create_authority(keys, now=now - timedelta(days=40))
    for party in ("owner", "north", "south"):
        issue_certificate(keys, party, days=5, now=now - timedelta(days=10))
    remote = f"[pipeline]\nstages = 4\nremote_workers = ['north', 'south']\npki = '{keys}'\n"

    with pytest.raises(CertificateError, match="expired"):
        quietly(make_alone(sections=remote), tmp_path / "run")

    card = make_card(tmp_path / "run")
    assert card.cause == "expired_certificate"
    assert "phalanx pki issue" in card.next_command
