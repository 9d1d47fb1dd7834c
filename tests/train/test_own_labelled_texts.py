"""A split over labelled texts of the clients' own: each client's files are its own, learned from and measured."""

import json

import pytest
import torch

from phalanx.errors import ConfigError, DataError
from phalanx.split import HeldOutScores
from phalanx.train import load_run
from phalanx.train.batches.labelled import prepare_labelled
from phalanx.train.batches.scores import describe_texts
from phalanx.train.engines.split_engine import LocalClients
from phalanx.train.setup.preflight import check_inputs

CLIENTS = ("client-0", "client-1")
TEXT = """
[model]
from_scratch = true

[model.architecture]
model_type = "gpt2"
vocab_size = 300
n_positions = 16
n_embd = 32
n_layer = 2
n_head = 4

[model.adapter]
rank = 2

[data]
tokenizer = { kind = "bpe", vocab_size = 260 }
sequence_length = 8

[data.labelled.task]
classes = ["flu", "cold"]
text = "note"
label = "diagnosis"
train = ["FOLDER/0.jsonl", "FOLDER/1.csv"]
test = ["FOLDER/0.test.jsonl", "FOLDER/1.test.csv"]

[train]
objective = "classification"
steps = 6
batch_size = 8
microbatches = 4

[optimizer]
lr = 1e-2

[split]
cut = 1
clients = 2
allow_insecure_sim = true
"""


def write_texts(folder, sizes=((12, 11), (9, 5))):
    """Files of two clients; every text says its class, its client and its number."""
    for client, (train, test) in enumerate(sizes):
        for name, count in (("", train), (".test", test)):
            rows = [(f"{kind} {kind} of {client}{name} {n}", kind) for n in range(count) for kind in [_kind(n)]]
            if client == 0:
                lines = (json.dumps({"note": text, "diagnosis": kind}) for text, kind in rows)
                (folder / f"0{name}.jsonl").write_text("\n".join(lines) + "\n")
            else:
                table = "\n".join(f"{kind},{text}" for text, kind in rows)
                (folder / f"1{name}.csv").write_text(f"diagnosis,note\n{table}\n")


def _kind(number):
    return ("flu", "cold")[number % 2]


@pytest.fixture
def make(tmp_path):
    write_texts(tmp_path)
    path = tmp_path / "run.toml"
    path.write_text(TEXT.replace("FOLDER", str(tmp_path)))
    return lambda *overrides: load_run(path, overrides)


@pytest.fixture
def texts(make):
    return prepare_labelled(make().data, CLIENTS, 3)


def test_each_client_has_all_texts_of_its_own_files_and_no_other(texts):
    assert [len(texts.clients[name].rows.classes) for name in CLIENTS] == [12, 9]
    for number, mine in enumerate(texts.shares.clients):
        assert all(f"of {number} " in one.text for one in mine)
    assert texts.holders == ("client-0",) * 11 + ("client-1",) * 5
    assert all(f"of {name[-1]}.test" in one.text for one, name in zip(texts.shares.test, texts.holders, strict=True))
    facts = describe_texts(texts, "own", 0)
    assert (facts["task"], facts["classes"], facts["train_texts"], facts["test_texts"]) == ("own", 2, 21, 16)


class Measuring:
    """Notes which client measured which rows."""

    def __init__(self):
        self.seen = []

    def measure_held_out(self, step, batches, senders, extras=None):
        parts = list(batches)
        self.seen = [(name, ids.shape[0]) for name, (ids, _) in zip(senders, parts, strict=True)]
        rows = torch.cat([ids for ids, _ in parts])
        labels = torch.cat([labels for _, labels in parts])
        self.rows = rows
        return HeldOutScores(0.0, rows.shape[0], tuple(int(one) for one in labels[labels >= 0]))


def test_a_client_measures_its_own_held_out_texts_and_no_batch_has_rows_of_two(texts):
    lead = Measuring()
    clients = LocalClients(lead, 2, texts.holders)
    whole = [texts.validation_batch(range(start, min(start + 8, 16))) for start in (0, 8)]

    scores = clients.measure_turn(3, iter(whole))

    assert lead.seen == [("client-0", 8), ("client-0", 3), ("client-1", 5)]
    assert torch.equal(lead.rows, texts.test.ids)
    assert scores.accuracy == 1.0


@pytest.mark.parametrize(
    ("override", "error", "named"),
    [
        ("split.clients=3", ConfigError, r"names 2 files, but split\.clients = 3"),
        ("data.labelled.task.train=['x.csv','y.csv']", DataError, r"x\.csv: is not a file"),
        ("data.labelled.task.classes=['flu','fever']", DataError, r"line 2: label 'cold' is not among the classes"),
    ],
)
def test_files_that_do_not_fit_the_run_are_refused(make, override, error, named):
    with pytest.raises(error, match=named):
        prepare_labelled(make(override).data, tuple(f"client-{n}" for n in range(make(override).split.clients)), 3)


def test_a_dry_run_looks_at_every_row(make, tmp_path):
    check_inputs(make())
    with (tmp_path / "1.test.csv").open("a") as file:
        file.write("plague,too late\n")

    with pytest.raises(DataError, match=r"1\.test\.csv, line 7: label 'plague'"):
        check_inputs(make())
