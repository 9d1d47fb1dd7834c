"""The section `[rollouts]`: workers of this machine or of others, and what these are told when they are invited."""

import pytest
from pydantic import ValidationError

from phalanx.errors import ConfigError, PeerLostError, PeerRefusedError
from phalanx.rollouts import RolloutCheck, RolloutsConfig, rollout_company
from phalanx.security.crypto import create_authority, issue_certificate, load_identity
from phalanx.train.parties.invited import invited_to
from phalanx.transport import ask_peer_run

RUN = """
[model]
from_scratch = true
[model.architecture]
model_type = "gpt2"
vocab_size = 12
n_positions = 12
n_embd = 32
n_layer = 4
n_head = 4
[data]
prompts = "prompts.jsonl"
tokenizer = { kind = "file", path = "tokenizer.json" }
sequence_length = 8
[train]
steps = 3
batch_size = 16
microbatches = 4
[train.objective]
kind = "grpo"
group = 4
max_new_tokens = 4
[rewards]
of = [{ kind = "places" }]
[optimizer]
lr = 1e-2
[pipeline]
stages = 4
[rollouts]
remote_workers = ["north", "south"]
pki = "keys"
"""


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({}, "give one of both"),
        ({"workers": 2, "remote_workers": ("north",), "pki": "keys"}, "give one of both"),
        ({"remote_workers": ("north",)}, "need each other"),
        ({"workers": 1, "pki": "keys"}, "need each other"),
        ({"remote_workers": ("north", "north"), "pki": "keys"}, "distinct names"),
        ({"remote_workers": ("owner",), "pki": "keys"}, "distinct names"),
        ({"remote_workers": ("north\n",), "pki": "keys"}, "pattern"),
        ({"workers": 1, "transport": {"port": 7070}}, "workers on this machine need none"),
    ],
)
def test_a_section_that_names_no_workers_or_contradicts_itself_is_refused(section, message):
    with pytest.raises(ValidationError, match=message):
        RolloutsConfig.model_validate(section)


def test_a_section_of_local_workers_is_written_as_it_was_before_there_were_remote_ones():
    assert set(RolloutsConfig(workers=2).model_dump()) == {"workers", "threads", "check"}


def test_invited_writers_are_told_what_they_do_and_see(tmp_path):
    run_file = tmp_path / "run.toml"
    run_file.write_text(RUN + '[rollouts.transport]\nport = 7070\nbind = "0.0.0.0"\n')

    directory, bind, terms = invited_to(run_file, ["south"], None, lambda run: pytest.fail("no stage is served"))

    assert (directory.name, bind, terms.port, terms.run) == ("keys", "0.0.0.0", 7070, "")
    assert "join with --writer" in terms.asks[0]
    assert "see the prompts, the weights and the texts" in terms.asks[2]


@pytest.mark.parametrize("names", [["south"], []])
def test_writers_are_not_invited_to_a_port_that_nobody_knows(tmp_path, names):
    (tmp_path / "run.toml").write_text(RUN)

    with pytest.raises(ConfigError, match=r"needs rollouts\.pki and a fixed rollouts\.transport\.port"):
        invited_to(tmp_path / "run.toml", names, None, lambda run: pytest.fail("no stage is served"))


def test_a_name_that_is_no_writer_is_not_invited_as_one(tmp_path):
    (tmp_path / "run.toml").write_text(RUN)

    with pytest.raises(ConfigError, match=r"nor east in pipeline\.remote_workers or pipeline\.may_join"):
        invited_to(tmp_path / "run.toml", ["east"], None, lambda run: pytest.fail("no stage is served"))


def test_a_session_without_any_remote_worker_ends_though_absent_ones_may_be_left_out(tmp_path):
    create_authority(tmp_path / "pki")
    issue_certificate(tmp_path / "pki", "owner")
    owner, absent = load_identity(tmp_path / "pki" / "owner"), []

    with (
        pytest.raises(PeerLostError, match="south: did not join within 0 s"),
        rollout_company(
            owner,
            ["north", "south"],
            "run-1",
            tmp_path / "evidence",
            RolloutCheck(answer_timeout_s=0.1),
            note_absent=lambda name, fault: absent.append(name),
        ),
    ):
        pytest.fail("no worker came")

    assert absent == ["north"]


def test_a_caller_that_is_no_writer_of_the_session_is_refused_and_does_not_wait(tmp_path):
    create_authority(tmp_path / "pki")
    for name in ("owner", "north", "south"):
        issue_certificate(tmp_path / "pki", name)
    owner, refused = load_identity(tmp_path / "pki" / "owner"), []

    def call_as_convicted(address):
        south = load_identity(tmp_path / "pki" / "south")
        with pytest.raises(PeerRefusedError, match="south is no party of this session") as refusal:
            ask_peer_run(south, "owner", address, "127.0.0.1:1", begins=True)
        refused.append(refusal.value)

    with (
        pytest.raises(PeerLostError, match="north: did not join"),
        rollout_company(
            owner,
            ["north"],
            "run-1",
            tmp_path / "evidence",
            RolloutCheck(answer_timeout_s=0.1),
            announce=call_as_convicted,
        ),
    ):
        pytest.fail("no worker came")

    assert len(refused) == 1
