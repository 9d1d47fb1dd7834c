"""What the owner of a split records of its clients' evidence, and without which word it trains nothing."""

import json

import pytest

from phalanx.config import digest_config
from phalanx.errors import FrameError
from phalanx.split import SplitConfig
from phalanx.split.channel import turn_messages as ask
from phalanx.train.records.record import describe_event
from phalanx.train.sessions.split_parties import APPRAISED, EVIDENCE_REFUSED, AppraisedClients

TPM = {"tpm": {"ak_names": ["00ff"], "measurements": {"sha256.0": ["cd" * 32]}}}
SPLIT = SplitConfig.model_validate_json(
    json.dumps(
        {
            "cut": 1,
            "clients": 2,
            "allow_insecure_sim": True,
            "remote_clients": ["north", "south"],
            "remote_enclave": "localhost:7071",
            "pki": "keys",
            "client_policies": {"north": TPM},
        }
    )
)
POLICY = digest_config(SPLIT.client_policies["north"])


def word(policy=POLICY, client="north"):
    return ask.ClientAppraised(client=client, evidence="tpm", policy=policy, device="", measurements={"sha256.0": "cd"})


def made():
    seen = []
    return AppraisedClients(SPLIT, lambda kind, body: seen.append((kind, body))), seen


def test_an_appraisal_is_recorded_with_its_policy_and_lets_the_run_begin():
    clients, seen = made()

    assert clients.take_appraisal(word())

    clients.check_all_appraised()
    facts = {"evidence": "tpm", "policy": POLICY, "device": "", "measurements": {"sha256.0": "cd"}}
    assert clients.facts == {"north": facts}
    assert seen == [(APPRAISED, {"client": "north", **facts})]
    assert describe_event(*seen[0])[1] == f"the enclave appraised north: tpm evidence, by policy {POLICY[:16]}"


@pytest.mark.parametrize(
    "words",
    [
        (),
        (word(policy="ab" * 32),),
        (word(), ask.ClientEvidenceRefused(client="north", reason="wrong_measurement")),
    ],
    ids=["none", "another policy", "refused since"],
)
def test_without_the_enclaves_word_on_every_client_with_a_policy_nothing_is_trained(words):
    clients, _ = made()
    for one in words:
        clients.take_appraisal(one)

    with pytest.raises(FrameError, match="north: is ready, but the enclave reported no evidence"):
        clients.check_all_appraised()


@pytest.mark.parametrize(
    "told",
    [word(client="south"), ask.ClientEvidenceRefused(client="nobody", reason="wrong_nonce")],
    ids=lambda m: m.kind,
)
def test_word_of_a_client_without_a_policy_is_refused_and_leaves_no_trace(told):
    clients, seen = made()

    with pytest.raises(FrameError, match=r"expected north, of which split\.client_policies has a policy"):
        clients.take_appraisal(told)

    assert (clients.facts, seen) == ({}, [])


def test_a_refusal_is_recorded_with_its_reason():
    clients, seen = made()

    assert clients.take_appraisal(ask.ClientEvidenceRefused(client="north", reason="missing_evidence"))

    assert seen == [(EVIDENCE_REFUSED, {"client": "north", "reason": "missing_evidence"})]
    assert "ignores north" in describe_event(*seen[0])[1]
    assert not clients.take_appraisal(ask.Conclude())
