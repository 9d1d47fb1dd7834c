"""The parties of a split join by one line each: keys made on the spot, the run file as the terms, and nothing else."""

import io
import json
import tomllib
from datetime import timedelta

import pytest

from phalanx.cli import run_command as command_line
from phalanx.cli.parties.join_split import ENCLAVE
from phalanx.config import digest_config
from phalanx.errors import ConfigError
from phalanx.security.crypto import create_authority, issue_certificate, load_identity
from phalanx.security.invite import EnrolmentServer, Invitations, JoinToken
from phalanx.split.config import ENCLAVE as ROLE
from phalanx.train import load_run
from phalanx.train.parties.client_file import read_client
from phalanx.train.parties.invited import invited_to
from tiny_run_file import tiny_run_file

SPLIT = """
[model.adapter]
rank = 4
[data.labelled.task]
classes = ["flu", "cold"]
[split]
cut = 1
clients = 2
allow_insecure_sim = true
remote_clients = ["north", "south"]
remote_enclave = "localhost:7171"
pki = "PKI"
"""


def run_text(home):
    text = tiny_run_file(SPLIT.replace("PKI", str(home / "keys")), validate_every=0)
    kept = [line for line in text.splitlines() if not line.startswith(("sources", "tokenizer", "max_", "validation_"))]
    return (
        "\n".join(kept)
        .replace("[train]", '[train]\nobjective = "classification"')
        .replace("sequence_length", f"tokenizer = {{ kind = 'file', path = '{home}/tokenizer.json' }}\nsequence_length")
    )


def no_pipeline(run):
    raise AssertionError(f"{run}: a split has no stages for workers")


@pytest.fixture
def owner(tmp_path):
    """An owner's directory with a run file and an authority; `invite` gives a token of a server that answers."""
    create_authority(tmp_path / "keys")
    issue_certificate(tmp_path / "keys", "owner")
    (tmp_path / "run.toml").write_text(run_text(tmp_path))
    for name in ("train", "test"):
        rows = [{"text": f"{name} {number}", "label": ("flu", "cold")[number % 2]} for number in range(4)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    invitations = Invitations(tmp_path / "keys")
    directory, _, terms = invited_to(tmp_path / "run.toml", ["north", "enclave"], None, no_pipeline)
    with EnrolmentServer(directory, invitations, terms).start_listening("127.0.0.1", 0) as server:

        def invite(name, lasts=timedelta(hours=1)):
            return invitations.invite_party(name, f"127.0.0.1:{server.port}", lasts).to_text()

        yield invite


def join(tmp_path, token, *words, at="site"):
    return command_line(["join", token, "--dir", str(tmp_path / at), "--no-serve", *words])


def texts(tmp_path):
    return ("--train", str(tmp_path / "train.jsonl"), "--test", str(tmp_path / "test.jsonl"), "--allow-insecure-sim")


def test_a_client_has_keys_the_owners_run_file_and_a_file_of_its_own_after_one_command(owner, tmp_path, capfd):
    assert join(tmp_path, owner("north"), *texts(tmp_path)) == 0

    told = capfd.readouterr().out
    config, run, name = read_client(tmp_path / "site" / "client.toml")
    assert (name, digest_config(run)) == ("north", digest_config(load_run(tmp_path / "run.toml")))
    assert config.allow_insecure_sim
    assert (tmp_path / "site" / "run.toml").read_bytes() == (tmp_path / "run.toml").read_bytes()
    assert "texts and labels stay on your machine" in told
    # the owner has the certificate that a run looks for, and no key
    assert [path.name for path in (tmp_path / "keys" / "north").iterdir() if path.suffix == ".key"] == []
    assert load_identity(tmp_path / "site").name == "north"


def test_a_token_from_standard_input_is_in_no_process_list(owner, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(owner("north") + "\n"))

    assert join(tmp_path, "-", *texts(tmp_path)) == 0

    assert load_identity(tmp_path / "site").name == "north"


def test_a_client_says_where_its_evidence_comes_from_by_the_same_command(owner, tmp_path):
    words = ("--attester", "tpm", "--tpm", "swtpm:path=/run/tpm/socket")

    assert join(tmp_path, owner("north"), *texts(tmp_path), *words) == 0

    config, _, _ = read_client(tmp_path / "site" / "client.toml")
    assert (config.attester, config.tpm) == ("tpm", "swtpm:path=/run/tpm/socket")


def test_a_client_with_a_policy_is_told_that_it_must_bring_evidence(tmp_path):
    policy = '[split.client_policies.north.tpm]\nak_names = ["00ff"]\nmeasurements."sha256.0" = ["' + "cd" * 32 + '"]\n'
    (tmp_path / "run.toml").write_text(run_text(tmp_path) + "\n" + policy)

    *_, terms = invited_to(tmp_path / "run.toml", ["north"], None, no_pipeline)

    assert any(line.startswith("as north: give evidence of your machine") for line in terms.asks)


def test_an_enclave_joins_without_texts_and_again_with_the_keys_that_it_has(owner, tmp_path, capfd):
    token = owner("enclave")

    assert [join(tmp_path, token), join(tmp_path, token)] == [0, 0]

    assert "already has keys, certificate and run file" in capfd.readouterr().out
    assert load_identity(tmp_path / "site").name == ENCLAVE == ROLE
    assert not (tmp_path / "site" / "client.toml").exists()


def test_a_token_that_is_wrong_used_expired_or_of_another_party_certifies_nobody(owner, tmp_path, capfd):
    used = owner("north")
    assert join(tmp_path, used, *texts(tmp_path)) == 0
    expired, replaced = owner("south", timedelta(seconds=-1)), owner("south")
    owner("south")

    for token, why in (
        (used, "was used already, with other keys than these"),
        (expired, "has replaced it"),
        (replaced, "has replaced it"),
    ):
        assert join(tmp_path, token, *texts(tmp_path), at="thief") == 4
        assert why in capfd.readouterr().err
        assert not (tmp_path / "thief" / "certificate.pem").exists()
        assert not (tmp_path / "thief" / "run.toml").exists()
    assert join(tmp_path, owner("south", timedelta(seconds=-1)), *texts(tmp_path), at="late") == 4
    assert "has expired" in capfd.readouterr().err


def test_a_client_that_names_no_texts_is_told_so_and_one_that_trusts_no_simulation_takes_part_in_none(
    owner, tmp_path, capfd
):
    token = owner("north")

    assert join(tmp_path, token, "--train", str(tmp_path / "train.jsonl")) == 2
    assert "a client needs both files of its own texts" in capfd.readouterr().err
    assert not (tmp_path / "site").exists()
    assert join(tmp_path, token, *texts(tmp_path)[:-1]) == 2
    assert "proves nothing to this client" in capfd.readouterr().err


def test_a_run_file_that_names_code_is_not_taken_from_an_owner(tmp_path, capfd):
    create_authority(tmp_path / "keys")
    issue_certificate(tmp_path / "keys", "owner")
    (tmp_path / "mine.py").write_text("class Notes: ...\n")
    (tmp_path / "run.toml").write_text(run_text(tmp_path) + '\n[[tracking]]\nkind = "mine.py:Notes"\n')
    directory, _, terms = invited_to(tmp_path / "run.toml", [], None, no_pipeline)
    invitations = Invitations(directory)

    with EnrolmentServer(directory, invitations, terms).start_listening("127.0.0.1", 0) as server:
        token = invitations.invite_party("enclave", f"127.0.0.1:{server.port}", timedelta(hours=1)).to_text()
        assert join(tmp_path, token) == 2

    assert "names code (mine.py:Notes), which an invitation never transfers" in capfd.readouterr().err
    assert not (tmp_path / "site" / "run.toml").exists()


@pytest.mark.parametrize(
    ("names", "change", "why"),
    [
        (["mallory"], {}, "split.remote_clients with mallory"),
        (["north"], {"# end": "# " + "x" * 13_000}, "above the limit of invitations"),
    ],
)
def test_what_cannot_be_invited_is_refused_at_the_owners(tmp_path, names, change, why):
    text = run_text(tmp_path) + "\n# end\n"
    for old, new in change.items():
        text = text.replace(old, new)
    (tmp_path / "run.toml").write_text(text)

    with pytest.raises(ConfigError, match=why):
        invited_to(tmp_path / "run.toml", names, None, no_pipeline)


def test_options_of_a_second_join_are_kept_and_all_that_was_said_before_as_well(owner, tmp_path, capfd):
    token = owner("north")
    assert join(tmp_path, token, *texts(tmp_path)[:-1], "--attester", "tpm") == 2
    refusal = capfd.readouterr().err
    # the refusal says in which file the cure belongs
    assert str(tmp_path / "site" / "client.toml") in refusal and "proves nothing to this client" in refusal

    assert join(tmp_path, token, *texts(tmp_path)[:-1], "--allow-insecure-sim") == 0

    told = capfd.readouterr().out
    assert "allow_insecure_sim = true (was left out)" in told
    config, _, _ = read_client(tmp_path / "site" / "client.toml")
    assert config.allow_insecure_sim and config.attester == "tpm"
    assert config.train == str(tmp_path / "train.jsonl")


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        (("--tpm", "swtpm:path=/run/tpm/other"), "tpm", "swtpm:path=/run/tpm/other"),
        (("--attester", "snp"), "attester", "snp"),
        (("--test", "other.jsonl"), "test", "other.jsonl"),
    ],
)
def test_each_option_of_a_second_join_reaches_the_file(owner, tmp_path, words, key, value):
    token = owner("north")
    assert join(tmp_path, token, *texts(tmp_path)) == 0
    (tmp_path / "other.jsonl").write_text((tmp_path / "test.jsonl").read_text().replace("test", "held out"))
    words = tuple(str(tmp_path / word) if word.endswith(".jsonl") else word for word in words)

    # the texts are not said again: the directory is a client's
    assert join(tmp_path, token, *words) == 0

    config, _, _ = read_client(tmp_path / "site" / "client.toml")
    assert getattr(config, key).endswith(value)


def test_a_policy_takes_the_place_of_the_simulation_that_was_allowed_before_and_the_other_way_round(owner, tmp_path):
    token, file = owner("north"), tmp_path / "site" / "client.toml"
    assert join(tmp_path, token, *texts(tmp_path)) == 0
    (tmp_path / "policy.toml").write_text("nothing = 1\n")

    assert join(tmp_path, token, "--policy", str(tmp_path / "policy.toml"))
    assert "allow_insecure_sim" not in file.read_text()
    assert join(tmp_path, token, "--allow-insecure-sim") == 0

    assert "policy" not in tomllib.loads(file.read_text())


def test_a_second_join_leaves_settings_and_comments_of_the_user_alone(owner, tmp_path):
    token, file = owner("north"), tmp_path / "site" / "client.toml"
    assert join(tmp_path, token, *texts(tmp_path)) == 0
    file.write_text(file.read_text() + "threads = 2  # of four\n\n[transport]\nport = 7171\n")

    assert join(tmp_path, token, "--train", str(tmp_path / "test.jsonl"), "--test", str(tmp_path / "train.jsonl")) == 0

    config, _, _ = read_client(file)
    assert (config.threads, config.transport.port) == (2, 7171)
    assert config.train == str(tmp_path / "test.jsonl") and "# of four" in file.read_text()


def test_a_token_for_a_second_run_brings_its_run_file_and_keeps_the_first_one(owner, tmp_path, capfd):
    first, file = owner("north"), tmp_path / "site" / "run.toml"
    assert join(tmp_path, first, *texts(tmp_path)) == 0
    before = file.read_text()
    key = load_identity(tmp_path / "site").public.public_key
    (tmp_path / "second.toml").write_text(run_text(tmp_path).replace("seed = 3", "seed = 4"))
    directory, _, terms = invited_to(tmp_path / "second.toml", ["north"], None, no_pipeline)
    invitations = Invitations(directory)

    with EnrolmentServer(directory, invitations, terms).start_listening("127.0.0.1", 0) as server:
        token = invitations.invite_party("north", f"127.0.0.1:{server.port}", timedelta(hours=1)).to_text()
        assert join(tmp_path, token) == 0

    _, run, _ = read_client(tmp_path / "site" / "client.toml")
    assert digest_config(run) == digest_config(load_run(tmp_path / "second.toml"))
    assert (tmp_path / "site" / "run-1.toml").read_text() == before
    assert "the token is for another run" in capfd.readouterr().out
    # the party is the same one, with the keys that it had
    assert load_identity(tmp_path / "site").public.public_key == key


def test_a_directory_of_another_party_or_another_owner_is_not_taken_for_this_one(owner, tmp_path, capfd):
    assert join(tmp_path, owner("north"), *texts(tmp_path)) == 0
    assert join(tmp_path, owner("south"), *texts(tmp_path)) == 2
    assert "holds the keys of 'north', but the token is for 'south'; give another --dir" in capfd.readouterr().err
    create_authority(tmp_path / "others")
    issue_certificate(tmp_path / "others", "owner")
    foreign = Invitations(tmp_path / "others").invite_party("north", "127.0.0.1:1", timedelta(hours=1)).to_text()

    assert join(tmp_path, foreign, *texts(tmp_path)) == 2

    assert "for the run of another owner; give another --dir" in capfd.readouterr().err


def test_no_secret_of_a_token_is_kept(owner, tmp_path):
    token = owner("north")
    assert join(tmp_path, token, *texts(tmp_path)) == 0

    kept = [path.read_text() for path in (tmp_path / "site").iterdir() if path.suffix in (".json", ".toml")]
    secret = JoinToken.from_text(token).secret
    assert not [text for text in kept if secret in text or token in text]
