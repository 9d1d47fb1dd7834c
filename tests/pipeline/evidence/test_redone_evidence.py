"""Evidence about weight gradients and updates: redone by whoever reads it, and refused where anything was altered.

The attacker is an owner's disk, or whoever passes its files on: it changes tensors, headers or names after the run.
"""

import hashlib
import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from phalanx.cli import run_command
from phalanx.errors import EvidenceError
from phalanx.pipeline import GuardConfig
from phalanx.pipeline.evidence.explain import UNPROVED, explain_evidence
from phalanx.pipeline.protocol.messages import Commit, StepAudited, UpdateReport
from phalanx.testing import Actor, MemoryCompany, rewrite_only, tampering, tiny_run

OTHER_DIGEST = "ab" * 32
STEP = 1
DOUBLED = Actor(tampering(twist=lambda gradients: {name: 2 * g for name, g in gradients.items()}))


def in_step(kind, change):
    """Change fields of a message of the step and let all others pass."""

    def rewrite(outgoing, message):
        return [outgoing if message.step != STEP else outgoing.with_fields(change(message))]

    return Actor(rewrite=rewrite_only(kind, rewrite))


def false_state(message):
    """Lie about the state after the step, of stage 1 alone."""
    lie = message.states["1"].model_copy(update={"moments": OTHER_DIGEST})
    return {"states": {**message.states, "1": lie}}


AUDITED = GuardConfig(step_audit_rate=1.0, owner_audit_rate=0.0, screen=False)
BY_OWNER = GuardConfig(step_audit_rate=0.0, owner_audit_rate=1.0, screen=False)
LOCKSTEP = GuardConfig(shadow="lockstep", owner_audit_rate=0.0, screen=False)
MIXED = GuardConfig(step_audit_rate=1.0, owner_audit_rate=0.0, screen=False, classes="mixed")
MIXED_BY_OWNER = GuardConfig(step_audit_rate=0.0, owner_audit_rate=1.0, screen=False, classes="mixed")
SCENES = {
    "stage, by its auditor": (AUDITED, {"worker-1": DOUBLED}, "worker-1", "gradient"),
    "auditor": (
        AUDITED,
        {"worker-2": in_step(StepAudited, lambda m: {"gradient": OTHER_DIGEST})},
        "worker-2",
        "gradient",
    ),
    "norm": (AUDITED, {"worker-1": in_step(Commit, lambda m: {"norm_squared": 1e-9})}, "worker-1", "gradient"),
    "stage, by the owner": (BY_OWNER, {"worker-1": DOUBLED}, "worker-1", "gradient"),
    "stage, in lockstep": (LOCKSTEP, {"worker-1": DOUBLED}, "worker-1", "gradient"),
    "stage, across classes": (MIXED, {"worker-1": DOUBLED}, "worker-1", "gradient"),
    "stage, across classes, by the owner": (MIXED_BY_OWNER, {"worker-1": DOUBLED}, "worker-1", "gradient"),
    "norm, across classes": (
        MIXED_BY_OWNER,
        {"worker-1": in_step(Commit, lambda m: {"norm_squared": 1e-9})},
        "worker-1",
        "gradient",
    ),
    "update of the holder": (AUDITED, {"worker-1": in_step(UpdateReport, false_state)}, "worker-1", "state"),
    "update of the shadow": (AUDITED, {"worker-2": in_step(UpdateReport, false_state)}, "worker-2", "state"),
}


@pytest.fixture(scope="module")
def evidence_of(tmp_path_factory, model_cache):
    """Run each scene once; give the evidence of its verdict."""
    known = {}

    def evidence(name):
        if name not in known:
            directory = tmp_path_factory.mktemp("run")
            guard, actors, party, offence = SCENES[name]
            with MemoryCompany(tiny_run(guard=guard), directory, actors, cache=model_cache) as company:
                company.run(3)
                company.engine.settle_last_step()
                assert [(verdict.party, verdict.offence) for verdict in company.verdicts] == [(party, offence)]
                known[name] = directory / "run" / company.verdicts[0].evidence
        return known[name]

    return evidence


@pytest.fixture
def altered(evidence_of, tmp_path):
    """Copy the evidence of a scene and alter it; the digest of the tensors is put right again."""

    def alter(name, record=lambda values: None, tensors=lambda held: None):
        source = evidence_of(name)
        path = tmp_path / source.name
        shutil.copy(source, path)
        beside = path.with_suffix(".safetensors")
        held = load_file(source.with_suffix(".safetensors"))
        tensors(held)
        save_file(held, beside)
        values = json.loads(path.read_text())
        values["tensors"]["sha256"] = hashlib.sha256(beside.read_bytes()).hexdigest()
        record(values)
        path.write_text(json.dumps(values))
        return path

    return alter


@pytest.mark.quick_cases(
    "stage,?across?classes", "norm,?across?classes", "stage,?by?its?auditor", "update?of?the?shadow"
)
@pytest.mark.parametrize("name", SCENES)
def test_a_wrong_gradient_or_update_is_proved_to_whoever_redoes_it(evidence_of, name):
    path = evidence_of(name)

    facts = explain_evidence(path, path.parent.parent / "pki" / "authority.pem")

    assert facts["conclusion"].startswith(f"holds: {SCENES[name][2]} signed")
    assert "owner recomputed it" not in facts["rests on the owner's word"]


@pytest.mark.parametrize("name", ["stage, by its auditor", "auditor", "stage, by the owner", "stage, in lockstep"])
def test_a_gradient_is_redone_with_weights_that_both_copies_had_signed(evidence_of, name):
    facts = explain_evidence(evidence_of(name))

    assert facts["recomputed here"] == "bit-equal to the referee's result"
    assert facts["weights"] == "their digest was signed by worker-1 and worker-2"


def nudge(prefix):
    """Change one number of the first tensor of this kind."""

    def change(tensors):
        name = min(name for name in tensors if name.startswith(prefix))
        tensors[name] = tensors[name].clone()
        tensors[name].view(-1)[0] += 1.0

    return change


@pytest.mark.parametrize(
    ("name", "prefix", "complaint"),
    [
        ("stage, by its auditor", "stage/", "weights differ from their signed digest"),
        ("stage, by its auditor", "input-", "differs from the stage's commitment"),
        ("stage, by its auditor", "gradient-", "differs from the stage's commitment"),
        ("auditor", "truth/", "signed and recomputed values accuse worker-1"),
        ("stage, by its auditor", "truth/", "away from the claim"),
        ("stage, across classes", "claim/", "is not the one that worker-1 signed"),
        ("stage, across classes, by the owner", "claim/", "is not the one that worker-1 signed"),
        ("stage, across classes", "input-", "differs from the stage's commitment"),
        ("norm, across classes", "claim/", "is not the one that worker-1 signed"),
        ("update of the holder", "stage/", "its state differs from the one signed before the step"),
        ("update of the holder", "truth/", "its gradient is not the committed one"),
        ("update of the shadow", "truth/", "its gradient is not the committed one"),
    ],
)
def test_an_altered_tensor_is_found(altered, name, prefix, complaint):
    with pytest.raises(EvidenceError, match=complaint):
        explain_evidence(altered(name, tensors=nudge(prefix)))


def setting(*keys, to):
    def change(record):
        for key in keys[:-1]:
            record = record[key]
        record[keys[-1]] = to

    return change


@pytest.mark.parametrize(
    ("name", "party"),
    [
        ("stage, by its auditor", "worker-2"),
        ("auditor", "worker-1"),
        ("norm", "worker-2"),
        ("stage, in lockstep", "worker-2"),
        ("stage, across classes", "worker-2"),
        ("stage, across classes, by the owner", "worker-2"),
        ("update of the holder", "worker-2"),
        ("update of the shadow", "worker-1"),
    ],
)
def test_evidence_does_not_speak_against_another_party_that_signed_the_truth(altered, name, party):
    with pytest.raises(EvidenceError, match=r"speaks? against|accuses|follows from the update|is not the one"):
        explain_evidence(altered(name, setting("verdict", "party", to=party)))


@pytest.mark.parametrize("name", ["stage, across classes", "stage, across classes, by the owner"])
def test_a_gradient_within_rounding_convicts_nobody_across_classes(altered, name):
    # the auditor signed the very gradient that is recomputed; in the second scene it signed none
    def show_truth(tensors):
        for each in [each for each in tensors if each.startswith("truth/")]:
            tensors[each.replace("truth/", "claim/")] = tensors[each].clone()

    with pytest.raises(EvidenceError, match=r"it is not guilty|accuses worker-2"):
        explain_evidence(altered(name, setting("verdict", "party", to="worker-2"), show_truth))


def swapped(one, other):
    def change(record):
        headers = record["headers"]
        headers[one], headers[other] = headers[other], headers[one]

    return change


@pytest.mark.parametrize(
    ("name", "one", "other"),
    [
        ("stage, by its auditor", "commit", "step_audited"),
        ("stage, in lockstep", "commit", "gradient_held"),
        ("stage, by its auditor", "commit", "state_holder"),
        ("update of the holder", "state_holder", "before_holder"),
        ("update of the holder", "apply", "commit"),
    ],
)
def test_a_header_in_the_place_of_another_one_is_found(altered, name, one, other):
    with pytest.raises(EvidenceError):
        explain_evidence(altered(name, swapped(one, other)))


@pytest.mark.parametrize(
    ("name", "role", "other"),
    [("stage, by its auditor", "state_holder", "commit"), ("update of the holder", "before_shadow", "state_holder")],
)
def test_a_header_of_another_kind_or_step_in_place_of_a_state_is_found(altered, name, role, other):
    def put(record):
        record["headers"][role] = record["headers"][other]

    with pytest.raises(EvidenceError):
        explain_evidence(altered(name, put))


@pytest.mark.parametrize(("key", "by"), [("stage", 1), ("step", 1), ("step", -1), ("step", 7)])
@pytest.mark.parametrize("name", ["stage, by its auditor", "update of the holder"])
def test_a_verdict_about_another_place_than_its_headers_is_found(altered, name, key, by):
    def move(record):
        record["verdict"][key] += by

    with pytest.raises(EvidenceError):
        explain_evidence(altered(name, move))


def without(*prefixes):
    def drop(tensors):
        for name in [name for name in tensors if name.startswith(prefixes)]:
            del tensors[name]

    return drop


@pytest.mark.parametrize(
    ("name", "left_out"),
    [
        ("auditor", ("stage/",)),
        ("auditor", ("input-",)),
        ("stage, by its auditor", ("stage/",)),
        ("stage, by its auditor", ("truth/", "stage/")),
        ("stage, in lockstep", ("stage/",)),
        ("stage, across classes", ("stage/",)),
        ("stage, across classes", ("gradient-",)),
        ("update of the holder", ("stage/",)),
        ("update of the shadow", ("truth/",)),
    ],
)
def test_what_is_left_out_leaves_the_verdict_unproved_and_says_so(altered, name, left_out):
    # what a stage committed to is no truth that would speak against its auditor
    facts = explain_evidence(altered(name, tensors=without(*left_out)))

    assert facts["conclusion"] == UNPROVED
    assert facts["rests on the owner's word"] != "nothing"


@pytest.mark.parametrize(
    ("change", "exit_code"),
    [(lambda tensors: None, 0), (nudge("input-"), EvidenceError.exit_code), (without("stage/"), 7)],
    ids=["proved", "refuted", "not proved by this file alone"],
)
def test_the_exit_code_tells_proved_refuted_and_neither_apart(altered, change, exit_code):
    path = altered("stage, by its auditor", tensors=change)

    assert run_command(["audit", "explain", str(path)]) == exit_code


def test_a_digest_of_weights_that_no_party_signed_proves_nothing(altered):
    def drop(record):
        for role in ("state_holder", "state_shadow"):
            del record["headers"][role]

    facts = explain_evidence(altered("stage, by its auditor", drop))

    assert (facts["conclusion"], facts["weights"]) == (UNPROVED, "digest not signed")


@pytest.mark.parametrize("role", ["apply", "commit", "before_holder"])
def test_an_update_without_the_decision_or_what_it_began_with_is_not_proved(altered, role):
    def drop(record):
        del record["headers"][role]
        if role == "before_holder":
            del record["headers"]["before_shadow"]

    facts = explain_evidence(altered("update of the holder", drop))

    assert facts["conclusion"] == UNPROVED
