"""A client's preferences: its reference is computed once, from its own copy of the model, and stays with it."""

import json

import pytest
from safetensors.torch import load_file

from phalanx.data import BpeConfig
from phalanx.data.tokenizers import train_bpe
from phalanx.errors import ConfigError, DataError
from phalanx.models import open_model
from phalanx.objectives.pairs import REFERENCE
from phalanx.security.crypto import create_authority, issue_certificate
from phalanx.train import load_run
from phalanx.train.batches import reference
from phalanx.train.parties.client_file import read_client
from phalanx.train.parties.client_texts import read_texts

RUN = """
[model]
from_scratch = true
[model.architecture]
model_type = "gpt2"
vocab_size = 300
n_positions = 32
n_embd = 16
n_layer = 3
n_head = 2
[model.adapter]
rank = 2
[data]
preferences = { PREFERENCES }
tokenizer = TOKENIZER
sequence_length = 24
[train]
objective = { kind = "dpo", beta = 0.2 }
steps = 4
batch_size = 8
microbatches = 2
[optimizer]
lr = 1e-2
[split]
cut = 1
clients = 2
allow_insecure_sim = true
remote_clients = ["north", "south"]
remote_enclave = "localhost:7071"
pki = "HOME/keys"
"""


def pair(number):
    return {"prompt": f"is {number}?", "chosen": f" yes {number % 7}", "rejected": f" no {number % 5}"}


@pytest.fixture
def make(tmp_path):
    """Write the files of one client; returns that of the client."""
    create_authority(tmp_path / "keys")
    issue_certificate(tmp_path / "keys", "north")
    texts = iter([" ".join(pair(n).values()) for n in range(30)])
    (tmp_path / "tokenizer.json").write_bytes(train_bpe(texts, BpeConfig(vocab_size=270)).to_json())

    def write(train=range(12), test=range(20, 24), extra="", **changes):
        run = RUN.replace("TOKENIZER", f'{{ kind = "file", path = "{tmp_path}/tokenizer.json" }}')
        for old, new in {"PREFERENCES": 'template = "plain"', **changes, "HOME": str(tmp_path)}.items():
            run = run.replace(old, new)
        (tmp_path / "run.toml").write_text(run)
        for name, rows in (("train", train), ("test", test)):
            lines = [row if isinstance(row, str) else json.dumps(pair(row)) for row in rows]
            (tmp_path / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines))
        (tmp_path / "client.toml").write_text(
            f'run = "{tmp_path}/run.toml"\nidentity = "{tmp_path}/keys/north"\ntrain = "{tmp_path}/train.jsonl"\n'
            f'test = "{tmp_path}/test.jsonl"\nallow_insecure_sim = true\ndirectory = "{tmp_path}/state"\n{extra}'
        )
        return tmp_path / "client.toml"

    return write


def opened(path, lines):
    client, run, name = read_client(path)
    source = open_model(run.model, path.parent / "models", run.train.seed)
    client.state_directory.mkdir(exist_ok=True)
    return read_texts(client, run, name, source, lines.append)


def test_each_microbatch_has_whole_pairs_with_the_reference_that_lies_in_the_clients_directory(make, tmp_path):
    draws = opened(make(), lines := []).draws

    ((ids, labels, extras),) = draws.draw_rows(0)

    assert ids.shape == labels.shape == (4, 24)
    assert (ids[0::2, :2] == ids[1::2, :2]).all()
    assert sum(len(part) for part, *_ in draws.held_out()) == 8
    (kept,) = (tmp_path / "state").glob("reference-*.safetensors")
    assert set(extras[REFERENCE].tolist()) <= set(load_file(kept)["train"].tolist())
    assert (extras[REFERENCE] < 0).all()
    assert any("log-probabilities of 32 rows" in line for line in lines)


def test_the_reference_is_computed_once_and_anew_for_other_pairs(make, monkeypatch):
    first = opened(make(), []).draws.draw_rows(3)
    with monkeypatch.context() as patch:
        patch.setattr(reference, "_log_probs", lambda *_: pytest.fail("is computed again"))
        again = opened(make(), lines := []).draws.draw_rows(3)
    other = opened(make(train=range(5)), more := [])

    assert [part[2][REFERENCE].tolist() for part in first] == [part[2][REFERENCE].tolist() for part in again]
    assert not any("computing" in line for line in lines)
    assert any("computing" in line for line in more)
    assert other.tokenizer == opened(make(), []).tokenizer


@pytest.mark.parametrize(
    ("train", "test", "named"),
    [
        (range(6), range(5, 9), "1 of its preferences are also training preferences"),
        (range(6), [], r"test\.jsonl: holds no preference"),
        ([1, "no JSON"], range(6, 9), r"train\.jsonl"),
        ([1, '{"prompt": "?", "chosen": "a", "rejected": "a"}'], range(6, 9), "both answers are equal"),
    ],
)
def test_pairs_that_are_wrong_are_named_before_anything_is_called(make, train, test, named):
    with pytest.raises(DataError, match=named):
        read_client(make(train, test))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"PREFERENCES": 'sources = [{ path = "x.jsonl" }]'}, "data.preferences.sources: not allowed"),
        ({'remote_clients = ["north", "south"]\nremote_enclave = "localhost:7071"\npki = "HOME/keys"': ""}, "missing"),
        ({'{ kind = "dpo", beta = 0.2 }': '"kto"'}, "its score compares wanted and unwanted answers"),
        ({'{ kind = "dpo", beta = 0.2 }': '"reward"'}, "none of scores"),
        ({'{ kind = "dpo", beta = 0.2 }': '"causal_lm"'}, "belong together"),
        ({"microbatches = 2": "microbatches = 8"}, "rows are pairs"),
    ],
)
def test_run_files_that_cannot_be_are_refused_with_the_reason(make, tmp_path, changes, named):
    make(**changes)

    with pytest.raises(ConfigError, match=named):
        load_run(tmp_path / "run.toml")


def test_a_pipeline_without_sources_of_preferences_is_refused(make, tmp_path):
    make()
    text = (tmp_path / "run.toml").read_text()
    (tmp_path / "run.toml").write_text(text[: text.index("[split]")] + "[pipeline]\nstages = 2\n")

    with pytest.raises(ConfigError, match=r"data\.preferences\.sources: missing"):
        load_run(tmp_path / "run.toml")
