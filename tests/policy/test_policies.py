"""A policy is believed by its signature alone; each clause that a run breaks is named; one person is one approval."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.config import load_config
from phalanx.data.shards import fingerprint_of
from phalanx.errors import ConfigError, PolicyError
from phalanx.policy import (
    Approval,
    EndFacts,
    RunFacts,
    SourceShare,
    TrainingPolicy,
    approve_release,
    check_release,
    check_start,
    count_approvals,
    raise_breaches,
    read_policy,
    sign_policy,
    signature_file,
)
from phalanx.security.crypto import Identity

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "policies"
OWNER = Identity.without_certificate("owner")
START = RunFacts("pipeline", "standard", None, (), True, "3" * 64, (SourceShare("a", "MIT", 50),) * 2, 1.0, 1e-7, True)
END = EndFacts(False, 1.0, {"facts.accuracy": 0.4, "prose.bits_per_byte": 1.5}, ("alice", "bob"))
FIGURES = {"facts.accuracy": 0.29, "prose.bits_per_byte": 1.5}
COPYLEFT = (SourceShare("nc", "CC-BY-NC-4.0", 1), SourceShare("b", "MIT", 999))
UNEVEN = (SourceShare("a", "MIT", 51), SourceShare("b", "MIT", 49))
BOTH = ("medical-lead", "data-protection")
BROKEN = {
    "verified_strangers": ({"preset": "light"}, {}, "train.presets"),
    "hospital": ({"engine": "split", "tier": "process"}, {"approvals": BOTH}, "train.tiers"),
    "open_licences": ({"sources": (SourceShare("web", "not stated", 9),)}, {}, "data.licences"),
    "non_commercial_limit": ({"sources": COPYLEFT}, {}, "data.max_shares.CC-BY-NC-4.0"),
    "balanced_sources": ({"sources": UNEVEN}, {}, "data.max_source_share"),
    "measured_leaks": ({}, {"exposure_bits": 6.1}, "privacy.max_exposure_bits"),
    "differential_privacy": ({"epsilon": 3.1}, {}, "privacy.max_epsilon"),
    "gated_release": ({}, {"figures": FIGURES}, "release.min_figures.facts.accuracy"),
    "four_eyes": ({}, {"approvals": ("alice",)}, "release.approvals"),
    "no_own_code": ({"own_code": ("my.py:reward",)}, {}, "train.own_code"),
}


@pytest.fixture
def signed(tmp_path):
    path = tmp_path / "policy.toml"
    path.write_text((EXAMPLES / "gated_release.toml").read_text())
    sign_policy(path, OWNER)
    return path


def breaches_of(name, start=START, end=END):
    policy = load_config(EXAMPLES / f"{name}.toml", TrainingPolicy)
    return [one.clause for one in (*check_start(policy, start), *check_release(policy, end))]


@pytest.mark.parametrize("name", BROKEN)
def test_one_breach_of_each_example_is_named_and_nothing_else(name):
    start, end, clause = BROKEN[name]
    kept = {"engine": "split", "tier": "tpm"} if name == "hospital" else {}
    approved = {"approvals": end.get("approvals", END.approvals)} if name == "hospital" else {}

    assert breaches_of(name, replace(START, **kept), replace(END, **approved)) == []
    assert breaches_of(name, replace(START, **(kept | start)), replace(END, **end)) == [clause]


def test_every_example_is_broken_in_a_test():
    assert {path.stem for path in EXAMPLES.glob("*.toml")} == BROKEN.keys()


@pytest.mark.parametrize(
    ("name", "start", "end", "clause"),
    [
        ("differential_privacy", {"epsilon": None, "delta": None}, {}, "privacy.max_epsilon"),
        ("differential_privacy", {"epsilon": float("nan")}, {}, "privacy.max_epsilon"),
        ("measured_leaks", {"measures_leak": False}, {}, "privacy.max_exposure_bits"),
        ("measured_leaks", {}, {"exposure_bits": None}, "privacy.max_exposure_bits"),
        ("measured_leaks", {}, {"exposure_bits": float("nan")}, "privacy.max_exposure_bits"),
        ("verified_strangers", {"preset": None}, {}, "train.presets"),
        ("verified_strangers", {"engine": "parallel", "preset": None}, {}, "train.engines"),
        ("verified_strangers", {}, {"is_in_doubt": None}, "release.undoubted"),
        ("verified_strangers", {}, {"is_in_doubt": True}, "release.undoubted"),
        ("open_licences", {"signer": None}, {}, "data.signers"),
        ("open_licences", {"sources": None}, {}, "data"),
        ("hospital", {"engine": "split", "tier": "tpm", "encrypts": False}, {}, "train.encrypted_checkpoints"),
        ("gated_release", {}, {"figures": {}}, "release.max_figures.prose.bits_per_byte"),
        ("gated_release", {}, {"figures": {"facts.accuracy": float("nan")}}, "release.min_figures.facts.accuracy"),
        ("four_eyes", {}, {"approvals": ("alice", "alice")}, "release.approvals"),
    ],
)
def test_what_is_not_known_breaks_a_clause(name, start, end, clause):
    assert clause in breaches_of(name, replace(START, **start), replace(END, **end))


def test_a_breach_tells_policy_clause_value_and_limit():
    policy = load_config(EXAMPLES / "differential_privacy.toml", TrainingPolicy)

    with pytest.raises(
        PolicyError, match=r"policy differential-privacy forbids the run: privacy.max_epsilon: found 9, allowed 3"
    ):
        raise_breaches(policy, check_start(policy, replace(START, epsilon=9.0)), "the run")


def test_a_signed_policy_is_read(signed):
    assert read_policy(signed, fingerprint_of(OWNER)).policy.name == "gated-release"


def test_comments_do_not_enter_the_signature(signed):
    signed.write_text("# agreed in May\n" + signed.read_text())

    assert read_policy(signed, fingerprint_of(OWNER)).policy.release.min_figures == {"facts.accuracy": 0.3}


def test_a_changed_clause_is_refused(signed):
    signed.write_text(signed.read_text().replace("0.3", "0.2"))

    with pytest.raises(PolicyError, match="changed since"):
        read_policy(signed, fingerprint_of(OWNER))


def test_a_policy_of_another_signer_is_refused(signed):
    # the attacker: a trainer without the owner's key, who signs an easier policy
    signed.write_text(signed.read_text().replace("0.3", "0.0"))
    trainer = Identity.without_certificate("trainer")
    sign_policy(signed, trainer)

    with pytest.raises(PolicyError, match="expected"):
        read_policy(signed, fingerprint_of(OWNER))
    # without the fingerprint in the run file it would be believed
    assert read_policy(signed, fingerprint_of(trainer)).policy.release.min_figures == {"facts.accuracy": 0.0}


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"[]", b"null", b'{"key": 1, "signature": "00"}', b'{"key": "x", "signature": "zz"}', b"[" * 5000],
)
def test_a_signature_file_that_is_none_is_refused(signed, content):
    signature_file(signed).write_bytes(content)

    with pytest.raises(PolicyError):
        read_policy(signed, fingerprint_of(OWNER))


def test_a_missing_signature_is_refused_with_the_command_that_makes_one(signed):
    signature_file(signed).unlink()

    with pytest.raises(PolicyError, match="phalanx policy sign"):
        read_policy(signed, fingerprint_of(OWNER))


def test_an_unknown_clause_is_refused(tmp_path):
    path = tmp_path / "policy.toml"
    path.write_text('name = "x"\n[release]\nmin_figure = { "a.b" = 1 }\n')

    with pytest.raises(ConfigError, match="min_figure"):
        sign_policy(path, OWNER)


@pytest.mark.parametrize(
    "release",
    [
        {"approvals": 2, "releasers": {"a": ["1" * 64]}},
        {"approvals": 1, "releasers": {"a": ["1" * 64], "b": ["1" * 64]}},
        {"releasers": {"../x": ["1" * 64]}},
    ],
)
def test_approvals_that_cannot_be_had_or_told_apart_are_refused(release):
    with pytest.raises(ValueError, match="releasers"):
        TrainingPolicy.model_validate({"name": "x", "release": release}, strict=False)


def test_approvals_without_releasers_are_broken_where_no_roles_name_them():
    policy = TrainingPolicy.model_validate({"name": "x", "release": {"approvals": 1}}, strict=False)

    breaches = check_release(policy, EndFacts(is_in_doubt=False, exposure_bits=None, figures={}, approvals=()))

    assert [breach.clause for breach in breaches] == ["release.approvals"]


@pytest.fixture
def people():
    keys = {name: Identity.without_certificate(name) for name in ("alice", "alice2", "bob", "mallory")}
    prints = {name: fingerprint_of(key) for name, key in keys.items()}
    releasers = {"alice": (prints["alice"], prints["alice2"]), "bob": (prints["bob"],)}
    policy = TrainingPolicy.model_validate(
        {"name": "x", "release": {"approvals": 2, "releasers": releasers}}, strict=False
    )
    return policy, keys


APPROVAL = Approval("run-1", "a" * 64)


def test_two_people_approve(tmp_path, people):
    policy, keys = people

    assert approve_release(tmp_path, policy, APPROVAL, keys["alice2"]) == "alice"
    assert count_approvals(tmp_path, policy, APPROVAL) == ["alice"]
    approve_release(tmp_path, policy, APPROVAL, keys["bob"])
    assert count_approvals(tmp_path, policy, APPROVAL) == ["alice", "bob"]


def test_two_keys_of_one_person_are_one_approval(tmp_path, people):
    # the attacker: one releaser with two keys, who wants to be two people
    policy, keys = people
    approve_release(tmp_path, policy, APPROVAL, keys["alice"])
    first = tmp_path / "approvals" / "alice.json"
    first.rename(tmp_path / "approvals" / "bob.json")
    approve_release(tmp_path, policy, APPROVAL, keys["alice2"])

    assert count_approvals(tmp_path, policy, APPROVAL) == ["alice"]


def test_a_stranger_cannot_approve(tmp_path, people):
    policy, keys = people

    with pytest.raises(PolicyError, match="nobody with the key"):
        approve_release(tmp_path, policy, APPROVAL, keys["mallory"])
    assert not (tmp_path / "approvals").exists()


@pytest.mark.parametrize("change", [{"run": "run-2"}, {"weights": "b" * 64}])
def test_an_approval_is_of_one_run_and_its_weights(tmp_path, people, change):
    policy, keys = people
    approve_release(tmp_path, policy, APPROVAL, keys["alice"])

    assert count_approvals(tmp_path, policy, replace(APPROVAL, **change)) == []


def test_an_approval_does_not_outlive_a_changed_policy(tmp_path, people):
    policy, keys = people
    approve_release(tmp_path, policy, APPROVAL, keys["alice"])
    other = policy.model_copy(update={"name": "y"})

    assert count_approvals(tmp_path, other, APPROVAL) == []


def test_a_run_that_has_not_ended_is_not_approved(tmp_path, people):
    policy, keys = people

    with pytest.raises(PolicyError, match="has not ended"):
        approve_release(tmp_path, policy, Approval("run-1", ""), keys["alice"])


@pytest.mark.parametrize("content", [b"", b"{}", b'{"key": "x", "signature": "00"}', json.dumps([1]).encode()])
def test_a_broken_approval_counts_for_nothing(tmp_path, people, content):
    policy, _ = people
    (tmp_path / "approvals").mkdir()
    (tmp_path / "approvals" / "alice.json").write_bytes(content)

    assert count_approvals(tmp_path, policy, APPROVAL) == []


def test_a_policy_without_suites_has_the_digest_that_was_signed_before_there_were_any(tmp_path):
    path = tmp_path / "ours.toml"
    path.write_text('name = "ours"\n[release]\nmin_figures = { "facts.accuracy" = 0.4 }\n')
    plain = load_config(path, TrainingPolicy)
    path.write_text(path.read_text() + f'suites.facts = {{ digest = "{"0" * 64}", rows = 3 }}\n')

    assert "suites" not in plain.model_dump(mode="json")["release"]
    assert load_config(path, TrainingPolicy).digest != plain.digest
