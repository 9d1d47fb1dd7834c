"""A client's conversations: rendered, marked and held apart where they are, and what is refused before a call."""

import json

import pytest

from phalanx.data import BpeConfig
from phalanx.data.tokenizers import train_bpe
from phalanx.errors import ConfigError, DataError
from phalanx.models import open_model
from phalanx.objectives import IGNORE
from phalanx.security.crypto import create_authority, issue_certificate
from phalanx.train.batches.remote_turns import RemoteTurns
from phalanx.train.parties.client_file import read_client
from phalanx.train.parties.client_texts import read_texts

RUN = """
[model]
from_scratch = true

[model.architecture]
model_type = "gpt2"
vocab_size = 300
n_positions = 64
n_embd = 16
n_layer = 2
n_head = 2

[model.adapter]
rank = 2

[data]
conversations = { template = "plain" }
tokenizer = { kind = "file", path = "HOME/tokenizer.json" }
sequence_length = 64

[train]
steps = 4
batch_size = 4
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


def talk(number):
    return {
        "messages": [
            {"role": "user", "content": f"{number}+{number}?"},
            {"role": "assistant", "content": f"it is {2 * number}"},
        ]
    }


@pytest.fixture
def make(tmp_path):
    """Writes keys, tokenizer, texts and files; returns the client's file."""
    create_authority(tmp_path / "keys")
    issue_certificate(tmp_path / "keys", "north")
    texts = [f"{role}: {number}+{number}? it is {2 * number}" for number in range(20) for role in ("User", "Assistant")]
    (tmp_path / "tokenizer.json").write_bytes(train_bpe(iter(texts), BpeConfig(vocab_size=270)).to_json())

    def write(train=range(6), test=range(6, 9), run=RUN, **changes):
        for name, numbers in (("train", train), ("test", test)):
            lines = [one if isinstance(one, str) else json.dumps(talk(one)) for one in numbers]
            (tmp_path / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines))
        for old, new in changes.items():
            assert old in run
            run = run.replace(old, new)
        (tmp_path / "run.toml").write_text(run.replace("HOME", str(tmp_path)))
        paths = {"run": "run.toml", "identity": "keys/north", "train": "train.jsonl", "test": "test.jsonl"}
        lines = [f'{name} = "{tmp_path}/{path}"' for name, path in paths.items()]
        (tmp_path / "client.toml").write_text("\n".join([*lines, "allow_insecure_sim = true"]) + "\n")
        return tmp_path / "client.toml"

    return write


def opened(path, home):
    client, run, name = read_client(path)
    client.state_directory.mkdir(mode=0o700, exist_ok=True)
    return read_texts(client, run, name, open_model(run.model, home / "models", run.train.seed), lambda line: None)


def test_labels_are_made_at_the_client_where_the_assistant_speaks(make, tmp_path):
    found = opened(make(), tmp_path)

    ((ids, labels, _),) = found.draws.draw_rows(0)
    from phalanx.data.tokenizers import load_tokenizer

    _, run, _ = read_client(tmp_path / "client.toml")
    tokenizer = load_tokenizer(run.data.tokenizer, None)
    for row, its in zip(ids, labels, strict=True):
        learned = tokenizer.backend.decode(its[its != IGNORE].tolist())
        assert "it is" in learned and "?" not in learned and "User" not in learned
        assert int((its != IGNORE).sum()) < 64 == row.numel()
    assert sum(ids.shape[0] for ids, *_ in found.draws.held_out()) == 3


def test_a_draw_depends_on_texts_seed_and_number_only_and_the_commitment_binds_the_texts(make, tmp_path):
    first, again = opened(make(), tmp_path), opened(make(), tmp_path)
    other = opened(make(train=range(5)), tmp_path)

    assert all(
        (one == two).all()
        for one, two in zip(first.draws.draw_rows(7)[0][:2], again.draws.draw_rows(7)[0][:2], strict=True)
    )
    own = read_client(tmp_path / "client.toml")[0].state_directory
    assert first.draws.texts_commitment(own) == again.draws.texts_commitment(own) != other.draws.texts_commitment(own)
    assert first.tokenizer == other.tokenizer


def test_clients_with_other_templates_have_no_common_digest(make, tmp_path):
    plain = opened(make(), tmp_path)
    (tmp_path / "own.jinja").write_text(
        "{% for message in messages %}{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}"
        "{% endgeneration %}{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
    )
    other = opened(make(**{'"plain"': f'"{tmp_path}/own.jinja"'}), tmp_path)

    assert plain.tokenizer != other.tokenizer


@pytest.mark.parametrize(
    ("train", "test", "named"),
    [
        (range(6), range(5, 9), "1 of its conversations are also training conversations"),
        (range(6), [], r"test\.jsonl: holds no conversation"),
        ([1, "no JSON"], range(6, 9), r"train\.jsonl"),
        ([1, '{"messages": [{"role": "user", "content": "?"}]}'], range(6, 9), r"train\.jsonl"),
    ],
)
def test_texts_that_are_wrong_are_named_before_anything_is_called(make, train, test, named):
    with pytest.raises(DataError, match=named):
        read_client(make(train, test))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            {'conversations = { template = "plain" }': 'conversations = { sources = [{ path = "x.jsonl" }] }'},
            "remote clients set these files in their client files",
        ),
        ({"sequence_length = 64": 'sequence_length = 64\nattention = "document"'}, "is a separate row"),
        ({'{ kind = "file", path = "HOME/tokenizer.json" }': '{ kind = "bpe", vocab_size = 260 }'}, "conversations"),
        (
            {
                'remote_clients = ["north", "south"]\nremote_enclave = "localhost:7071"\npki = "HOME/keys"\n': "",
            },
            "data.conversations.sources: missing; add at least one",
        ),
    ],
)
def test_a_run_file_that_cannot_be_one_of_remote_conversations_is_refused(make, changes, named):
    with pytest.raises(ConfigError, match=named):
        read_client(make(**changes))


def test_the_owner_counts_draws_of_rows_that_it_does_not_have():
    assert RemoteTurns(4, 64).next_batch().input_ids.shape == (4, 64)
