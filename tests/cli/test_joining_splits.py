"""The parties of a split join by one line each: keys made on the spot, the run file as the terms, and nothing else."""

import json
from datetime import timedelta

import pytest

from phalanx.cli import run as command_line
from phalanx.cli.parties.join_split import ENCLAVE
from phalanx.config import digest
from phalanx.errors import ConfigError
from phalanx.security.crypto import create_authority, issue, load_identity
from phalanx.security.invite import EnrolmentServer, Invitations
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
    issue(tmp_path / "keys", "owner")
    (tmp_path / "run.toml").write_text(run_text(tmp_path))
    for name in ("train", "test"):
        rows = [{"text": f"{name} {number}", "label": ("flu", "cold")[number % 2]} for number in range(4)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    invitations = Invitations(tmp_path / "keys")
    directory, _, terms = invited_to(tmp_path / "run.toml", ["north", "enclave"], None, no_pipeline)
    with EnrolmentServer(directory, invitations, terms).listen("127.0.0.1", 0) as server:

        def invite(name, lasts=timedelta(hours=1)):
            return invitations.invite(name, f"127.0.0.1:{server.port}", lasts).line()

        yield invite


def join(tmp_path, token, *words, at="site"):
    return command_line(["join", token, "--dir", str(tmp_path / at), "--no-serve", *words])


def texts(tmp_path):
    return ("--train", str(tmp_path / "train.jsonl"), "--test", str(tmp_path / "test.jsonl"), "--allow-insecure-sim")


def test_a_client_has_keys_the_owners_run_file_and_a_file_of_its_own_after_one_command(owner, tmp_path, capfd):
    assert join(tmp_path, owner("north"), *texts(tmp_path)) == 0

    told = capfd.readouterr().out
    config, run, name = read_client(tmp_path / "site" / "client.toml")
    assert (name, digest(run)) == ("north", digest(load_run(tmp_path / "run.toml")))
    assert config.allow_insecure_sim
    assert (tmp_path / "site" / "run.toml").read_bytes() == (tmp_path / "run.toml").read_bytes()
    assert "texts and labels stay on your machine" in told
    # the owner has the certificate that a run looks for, and no key
    assert [path.name for path in (tmp_path / "keys" / "north").iterdir() if path.suffix == ".key"] == []
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

    assert any(line.startswith("as north: bring evidence of your machine") for line in terms.asks)


def test_an_enclave_joins_without_texts_and_again_with_the_keys_that_it_has(owner, tmp_path, capfd):
    token = owner("enclave")

    assert [join(tmp_path, token), join(tmp_path, token)] == [0, 0]

    assert "has keys, certificate and run file already" in capfd.readouterr().out
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
    assert "names its own texts, of both kinds" in capfd.readouterr().err
    assert not (tmp_path / "site").exists()
    assert join(tmp_path, token, *texts(tmp_path)[:-1]) == 2
    assert "proves nothing to this client" in capfd.readouterr().err


def test_a_run_file_that_names_code_is_not_taken_from_an_owner(tmp_path, capfd):
    create_authority(tmp_path / "keys")
    issue(tmp_path / "keys", "owner")
    (tmp_path / "mine.py").write_text("class Notes: ...\n")
    (tmp_path / "run.toml").write_text(run_text(tmp_path) + '\n[[tracking]]\nkind = "mine.py:Notes"\n')
    directory, _, terms = invited_to(tmp_path / "run.toml", [], None, no_pipeline)
    invitations = Invitations(directory)

    with EnrolmentServer(directory, invitations, terms).listen("127.0.0.1", 0) as server:
        token = invitations.invite("enclave", f"127.0.0.1:{server.port}", timedelta(hours=1)).line()
        assert join(tmp_path, token) == 2

    assert "names code (mine.py:Notes), which an invitation never brings" in capfd.readouterr().err
    assert not (tmp_path / "site" / "run.toml").exists()


@pytest.mark.parametrize(
    ("names", "change", "why"),
    [
        (["mallory"], {}, "split.remote_clients with mallory"),
        (["north"], {"# end": "# " + "x" * 13_000}, "no invitation takes"),
    ],
)
def test_what_cannot_be_invited_is_refused_at_the_owners(tmp_path, names, change, why):
    text = run_text(tmp_path) + "\n# end\n"
    for old, new in change.items():
        text = text.replace(old, new)
    (tmp_path / "run.toml").write_text(text)

    with pytest.raises(ConfigError, match=why):
        invited_to(tmp_path / "run.toml", names, None, no_pipeline)
