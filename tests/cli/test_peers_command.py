"""phalanx peers: the parties of a run, from files alone, and what --revoke says."""

import io
import json
import re
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import pytest

from phalanx.cli import run_command
from phalanx.errors import CertificateError, ConfigError
from phalanx.security.crypto import RevokedParties, create_authority, make_request, sign_request
from phalanx.security.invite import Invitations
from phalanx.telemetry import PartyRow
from phalanx.telemetry.parties import PartiesStatus
from phalanx.train import look_at_peers
from tiny_run_file import tiny_run_file


@pytest.fixture
def keys(tmp_path):
    create_authority(tmp_path / "keys")
    for name in ("alice", "bob"):
        sign_request(tmp_path / "keys", make_request(tmp_path / name, name))
    return tmp_path / "keys"


@pytest.fixture
def run_dir(keys, tmp_path):
    """A run directory with a status of long ago."""
    home = tmp_path / "run"
    home.mkdir()
    sections = f"[pipeline]\nstages = 4\npki = {json.dumps(str(keys))}\nremote_workers = ['alice', 'bob']\n"
    (home / "config.toml").write_text(tiny_run_file(sections + "[pipeline.transport]\nport = 7070\n"))
    verdict = "step 2, stage 1: another \x1b[2Jresult"
    rows = (
        PartyRow(name="alice", state="serving", serves=(1,), since_step=0, steps=2, audits={"messages": 2}, heard=995),
        PartyRow(name="bob", state="evicted", verdicts=(verdict,)),
    )
    status = PartiesStatus(run="first", step=2, steps=6, written=1000, parties=rows)
    (home / "peers.json").write_text(status.model_dump_json())
    return home


def shown(*arguments):
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = run_command(["peers", *map(str, arguments)])
    words = out.getvalue() + err.getvalue()
    return SimpleNamespace(exit_code=code, stdout=out.getvalue(), stderr=err.getvalue(), output=words)


def test_a_run_is_shown_with_what_each_party_does_and_was_found_guilty_of(run_dir):
    result = shown(run_dir)

    assert result.exit_code == 0, result.output
    assert "first: step 2 of 6, no sign of the owner for" in result.output
    assert "alice" in result.output
    assert "serving 1" in result.output
    assert "bob is guilty: step 2, stage 1: another ?[2Jresult" in result.output
    assert "alice was audited in 2 steps: messages 2" in result.output


@pytest.mark.parametrize(
    ("age", "ended", "words"),
    [
        (0, False, "under way"),
        (10, False, "under way"),
        (11, False, "no sign of the owner for 11 s"),
        (99, True, "not under way"),
    ],
)
def test_the_heading_says_whether_the_run_goes_on(run_dir, age, ended, words):
    view = look_at_peers(run_dir)
    changed = view.status.model_copy(update={"ended": ended})

    assert words in replace(view, status=changed).describe_progress(1000 + age)


def test_json_has_every_party_and_nothing_beside_it(run_dir, keys):
    Invitations(keys).invite_party("carol", "127.0.0.1:7070", timedelta(days=1))

    found = json.loads(shown(run_dir, "--json").stdout)

    assert {row["name"]: row["state"] for row in found["parties"]} == {
        "alice": "serving",
        "bob": "evicted",
        "carol": "invited",
    }
    assert (found["session"]["step"], found["owner_is_silent"]) == (2, True)


def test_after_the_end_nobody_is_at_work(run_dir):
    path = run_dir / "peers.json"
    path.write_text(path.read_text().replace('"ended":false', '"ended":true'))

    assert [row.state for row in look_at_peers(run_dir).rows] == ["certified", "evicted"]


def test_before_the_first_session_the_authority_tells(keys):
    result = shown(keys)

    assert result.exit_code == 0, result.output
    assert "no session has started" in result.output
    assert re.search(r"alice +certified", result.output)


def test_a_certificate_is_revoked_and_shown_so(run_dir, keys):
    result = shown(run_dir, "--revoke", "alice", "--reason", "the laptop was stolen")

    assert result.exit_code == 0, result.output
    assert "the certificate of alice is revoked" in result.output
    assert RevokedParties(keys).read_revocations()["alice"].reason == "the laptop was stolen"
    assert "alice is revoked: the laptop was stolen" in shown(run_dir).output


SPLIT = """
[model.adapter]
rank = 4
[split]
cut = 1
clients = 2
allow_insecure_sim = true
remote_clients = ["alice", "bob"]
remote_enclave = "localhost:7171"
pki = "PKI"
"""
FEDERATED = """
[federated]
sites = ["alice", "bob"]
carrier = "bridge"
pki = "PKI"
"""


@pytest.mark.parametrize("section", [SPLIT, FEDERATED], ids=["split", "federated"])
def test_a_party_of_a_split_or_of_rounds_is_revoked_by_the_run_file_too(keys, tmp_path, section):
    text = tiny_run_file(section.replace("PKI", str(keys)), validate_every=0)
    if section == SPLIT:
        left_out = ("sources", "tokenizer", "max_", "validation_")
        kept = "\n".join(line for line in text.splitlines() if not line.startswith(left_out))
        own = 'conversations = {}\ntokenizer = { kind = "file", path = "tokenizer.json" }\nsequence_length'
        text = kept.replace("sequence_length", own)
    (tmp_path / "run.toml").write_text(text)

    result = shown(tmp_path / "run.toml", "--revoke", "alice")

    assert result.exit_code == 0, result.output
    assert list(RevokedParties(keys).read_revocations()) == ["alice"]


def test_an_invitation_is_taken_back(keys):
    Invitations(keys).invite_party("carol", "127.0.0.1:7070", timedelta(days=1))

    result = shown(keys, "--revoke", "carol", "--json")

    assert result.exit_code == 0, result.output
    assert "the invitation of carol is revoked" in result.stderr
    assert "carol" not in [row["name"] for row in json.loads(result.stdout)["parties"]]


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (("--revoke", "nobody"), CertificateError, "neither invited nor certified"),
        (("--revoke", "owner"), CertificateError, "neither invited nor certified"),
        (("--reason", "because"), ConfigError, "add --revoke NAME"),
    ],
)
def test_what_cannot_be_done_is_refused_in_words(keys, arguments, error, words):
    result = shown(keys, *arguments)

    assert result.exit_code == error.exit_code
    assert words in result.stderr


def test_a_list_that_cannot_be_read_is_not_passed_over(run_dir, keys):
    (keys / "revoked.json").touch(mode=0o600)

    result = shown(run_dir)

    assert result.exit_code == CertificateError.exit_code


def test_what_is_no_run_is_refused(tmp_path):
    assert shown(tmp_path).exit_code == ConfigError.exit_code
