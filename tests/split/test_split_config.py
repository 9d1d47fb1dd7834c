"""What a split cannot be is said before anything starts, with what to do about it."""

import json
import tomllib

import pytest
from pydantic import ValidationError
from split_scene import LAYERS, SEQ, split_config

from phalanx.config import digest_config, dump_toml
from phalanx.errors import ConfigError
from phalanx.security.seal import ReleasePolicy
from phalanx.split import SplitConfig
from phalanx.split.admission.config import ClientAdmissionConfig
from phalanx.split.check import check_split
from phalanx.split.masked import MaskedConfig
from phalanx.transport import TransportConfig


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"mode": "plaintext"}, ["plaintext", "insecure = true", 'mode = "sealed"']),
        ({"allow_insecure_sim": True, "masked": MaskedConfig(rows=7)}, ["split.masked", "remove it"]),
        ({"allow_insecure_sim": True, "masked": MaskedConfig()}, ["split.masked", "remove it"]),
        ({"allow_insecure_sim": True, "masked": MaskedConfig(pads="aes", reserve=2)}, ["split.masked", "remove it"]),
        ({"insecure": True, "allow_insecure_sim": True}, ["insecure = true", "remove it"]),
        ({}, ['tier = "sim"', "NOT SECURE", "allow_insecure_sim = true"]),
        ({"tier": "tpm", "allow_insecure_sim": True}, ["allow_insecure_sim", "tpm"]),
        ({"cut": 0, "allow_insecure_sim": True}, ["cut"]),
        ({"clients": 0, "allow_insecure_sim": True}, ["clients"]),
        (
            {"allow_insecure_sim": True, "clients": 2, "release": ReleasePolicy(min_clients=3, clip_norm=1.0)},
            ["min_clients = 3", "clients = 2", "lower it"],
        ),
        (
            {
                "allow_insecure_sim": True,
                "clients": 5,
                "release": ReleasePolicy(min_clients=3, clip_norm=1.0),
                "admission": ClientAdmissionConfig(rule="krum", byzantine=1),
            },
            ['"krum"', "one client", '"multi_krum"'],
        ),
        (
            {"allow_insecure_sim": True, "transport": TransportConfig(bind="0.0.0.0")},
            ["0.0.0.0", "this machine only"],
        ),
    ],
)
def test_an_impossible_combination_is_named(given, named):
    with pytest.raises(ValidationError) as refusal:
        SplitConfig(**{"cut": 2, **given})

    assert [word for word in named if word not in str(refusal.value)] == []


@pytest.mark.parametrize(
    ("split", "seq", "objective", "named"),
    [
        (split_config(cut=LAYERS), SEQ, "causal_lm", [f"split.cut = {LAYERS}", f"1 to {LAYERS - 1}"]),
        (split_config(), SEQ + 1, "causal_lm", ["sequence_length", "lower it"]),
        (split_config(), SEQ, "dancing", ["train.objective", "causal_lm"]),
        (SplitConfig(cut=2, tier="tpm"), SEQ, "causal_lm", ["split.policy", "tpm"]),
        (split_config(policy="/nowhere/policy.toml"), SEQ, "causal_lm", ["/nowhere/policy.toml"]),
    ],
)
def test_what_shows_only_with_the_model_or_the_machine_is_named_too(source, split, seq, objective, named):
    with pytest.raises(ConfigError) as refusal:
        check_split(split, source, seq=seq, objective=objective)

    assert [word for word in named if word not in str(refusal.value)] == []


def test_a_split_that_can_work_is_let_through(source):
    check_split(split_config(), source, seq=SEQ, objective="causal_lm")
    check_split(split_config("plaintext"), source, seq=SEQ, objective="causal_lm")


@pytest.mark.parametrize("mode", ["sealed", "masked"])
def test_a_resolved_file_has_the_masking_only_where_there_is_one_and_the_digest_always(mode):
    split = SplitConfig(cut=2, mode=mode, allow_insecure_sim=True)

    again = SplitConfig.model_validate_json(json.dumps(tomllib.loads(dump_toml(split))))

    assert ("masked" in tomllib.loads(dump_toml(split))) is (mode == "masked")
    assert "masked" in split.model_dump(mode="json")
    assert (again, digest_config(again)) == (split, digest_config(split))


def test_the_resolved_file_of_an_earlier_version_is_read():
    earlier = {"cut": 2, "allow_insecure_sim": True, "masked": MaskedConfig().model_dump(exclude_none=True)}

    assert SplitConfig.model_validate_json(json.dumps(earlier)) == SplitConfig(cut=2, allow_insecure_sim=True)


CODE = {"measurements": {"code": ["ab" * 32]}}
PROVES = {"allow_insecure_sim": True, "sim": CODE}
TPM = {"tpm": {"ak_names": ["00ff"], "measurements": {"sha256.0": ["cd" * 32]}}}


def remote(**client_policies):
    """A split of clients of other owners, as a file has it."""
    given = {"remote_clients": ["north", "south"], "remote_enclave": "localhost:7071", "pki": "keys"}
    given |= {"client_policies": client_policies} if client_policies else {}
    return SplitConfig.model_validate_json(json.dumps({"cut": 2, "clients": 2, "allow_insecure_sim": True, **given}))


@pytest.mark.parametrize(
    ("policies", "named"),
    [
        ({"east": PROVES}, "client_policies.east: is for a client that is a process of another owner.*north, south"),
        ({"north": {}}, "needs reference values of a kind"),
        ({"north": {"allow_insecure_sim": True}}, "needs reference values of a kind"),
        ({"north": {**PROVES, "expect": {"report_data": "00"}}}, "no .expect."),
        ({"north": {"sim": CODE}}, "simulated evidence proves nothing"),
        ({"north": {"tpm": {**TPM["tpm"], "roots": ["vendor.pem"]}}}, "names the file 'vendor.pem'"),
        ({"north": {"tpm": {**TPM["tpm"], "crls": ["vendor.crl"]}}}, "names the file 'vendor.crl'"),
        ({"north": {"tmp": TPM["tpm"]}}, "tmp"),
    ],
)
def test_a_clients_policy_that_cannot_be_one_is_named(policies, named):
    with pytest.raises(ValidationError, match=named):
        remote(**policies)


def test_a_client_that_the_run_plays_itself_has_no_policy():
    with pytest.raises(ValidationError, match="those here: none"):
        SplitConfig.model_validate_json(
            json.dumps({"cut": 2, "allow_insecure_sim": True, "client_policies": {"client-0": PROVES}})
        )


def test_a_clients_policy_is_part_of_the_runs_digest_and_none_changes_nothing():
    bare, with_policy = remote(), remote(north=TPM)

    again = SplitConfig.model_validate_json(json.dumps(tomllib.loads(dump_toml(with_policy))))

    assert "client_policies" not in bare.model_dump(mode="json")
    assert (again, digest_config(again)) == (with_policy, digest_config(with_policy))
    assert len({digest_config(one) for one in (bare, with_policy, remote(north=PROVES), remote(south=TPM))}) == 4


def test_a_root_in_a_clients_policy_that_cannot_be_read_is_named_before_anything_starts(source):
    broken = {"tpm": {**TPM["tpm"], "roots": ["-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"]}}

    with pytest.raises(ConfigError, match=r"client_policies\.north: roots"):
        check_split(remote(north=broken), source, seq=SEQ, objective="causal_lm")
    check_split(remote(north=TPM), source, seq=SEQ, objective="causal_lm")


REMOTE = {"clients": 2, "remote_clients": ("north", "south"), "remote_enclave": "localhost:7071", "pki": "keys"}
MASKED = {**REMOTE, "mode": "masked", "allow_insecure_sim": True}
AT = MaskedConfig(address="localhost:7072")


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({**MASKED}, ["masked.address", "set it"]),
        ({"mode": "masked", "allow_insecure_sim": True, "masked": AT}, ["masked.address", "remove it"]),
        ({**MASKED, "masked": MaskedConfig(address="far.example:7072")}, ["far.example", "this machine only"]),
        (
            {**MASKED, "masked": AT, "tier": "process", "allow_insecure_sim": False},
            ["masked.address", "reaches no network"],
        ),
        ({**MASKED, "masked": AT, "workers_see_hidden_states": True}, ["hidden states", "no client appraises them"]),
        ({**REMOTE, "mode": "plaintext", "insecure": True}, ["cross sealed", '"masked"']),
    ],
)
def test_masked_workers_of_others_come_with_clients_of_others(given, named):
    with pytest.raises(ValidationError) as refusal:
        SplitConfig(**{"cut": 2, **given})

    assert [word for word in named if word not in str(refusal.value)] == []
    assert SplitConfig(cut=2, **MASKED, masked=AT).masked_workers == ("masked-0",)
