"""A party whose certificate the owner has taken back serves no stage: neither a new server nor one that is running."""

import pytest
from stage_scene import ENGINE, Scene, texts_of

from phalanx.errors import CertificateError, ConfigError
from phalanx.security.crypto import RevokedParties, create_authority, issue_certificate
from phalanx.serve.stages import StagesConfig, relay
from phalanx.serve.stages.staged_model import open_staged_model
from phalanx.serve.stages.transcript import StageLostError

PROMPTS = ["the end", "in a day"]


class Revocations:
    """A list that may be damaged."""

    def __init__(self):
        self.names, self.is_damaged = set(), False

    def __call__(self):
        if self.is_damaged:
            raise CertificateError("revoked.json: is no list of revocations")
        return frozenset(self.names)


@pytest.fixture
def revoked(monkeypatch):
    monkeypatch.setattr(relay, "_REVOCATIONS_EVERY_S", 0.0)
    return Revocations()


@pytest.mark.parametrize("party", ["back-1", "front-2"])
def test_a_revoked_party_is_taken_out_of_a_running_server_and_no_token_changes(
    directory, one_process, tmp_path, revoked, party
):
    with Scene(tmp_path, directory, revoked=revoked) as scene:
        before = scene.texts(PROMPTS)
        revoked.names.add(party)
        after = scene.texts(PROMPTS)

    assert before == after == texts_of(one_process, PROMPTS)
    assert (scene.relay.departures, scene.relay.verdicts) == ({party: "revoked"}, [])
    assert [facts["reason"] for facts in scene.told("stage_lost")] == ["its certificate was revoked"]


def test_while_the_list_cannot_be_read_nobody_is_asked(directory, one_process, tmp_path, revoked):
    with Scene(tmp_path, directory, revoked=revoked) as scene:
        revoked.is_damaged = True
        texts = scene.texts(PROMPTS)
        revoked.is_damaged = False
        later = scene.texts(PROMPTS)

    assert all(isinstance(text, StageLostError) for text in texts)
    assert later == texts_of(one_process, PROMPTS)


def test_a_revoked_party_is_named_before_a_server_waits_for_it(directory, tmp_path):
    pki = tmp_path / "pki"
    create_authority(pki)
    for name in ("owner", "alice", "bob"):
        issue_certificate(pki, name)
    RevokedParties(pki).revoke_party("bob", "the laptop was stolen")
    config = StagesConfig(identity=str(pki / "owner"), holders=(("alice", "bob"),))

    with (
        pytest.raises(ConfigError, match="the certificate of bob was revoked"),
        open_staged_model("tiny", directory, config, ENGINE, tmp_path / "access"),
    ):
        pass
