"""Evidence of every kind of verdict, from simulated runs, read by an outsider; then altered in every way."""

import hashlib
import json
import shutil
from dataclasses import dataclass

import pytest
import torch
from safetensors.torch import load_file, save_file

from phalanx.errors import EvidenceError
from phalanx.pipeline import GuardConfig, token_distance
from phalanx.pipeline.evidence.checked import Pins
from phalanx.pipeline.evidence.explain import explain_evidence, judge_evidence
from phalanx.pipeline.evidence.files import MAX_RECORD_BYTES, MAX_TENSOR_BYTES, read_tensors, write_tensors
from phalanx.pipeline.evidence.recompute import MAX_LAYERS
from phalanx.pipeline.protocol.messages import (
    Activation,
    AuditReport,
    Bulk,
    Commit,
    PassedOnHeader,
    SentDigest,
    UpdateReport,
)
from phalanx.security.crypto import create_authority, issue_certificate
from phalanx.testing import Actor, MemoryCompany, rewrite_only, tampering, tiny_run

OTHER_DIGEST = "ab" * 32


def flip(direction):
    def tamper(found, step, microbatch, tensor):
        return -tensor if (found, step) == (direction, 1) else tensor

    return Actor(tampering(tamper))


def at_step_1(kind, change):
    """Change fields of a message of step 1 and let all others pass."""

    def rewrite(outgoing, message):
        return [outgoing if message.step != 1 else outgoing.with_fields(change(message))]

    return Actor(rewrite=rewrite_only(kind, rewrite))


def false_report(message):
    return {"digests": dict.fromkeys(message.digests, OTHER_DIGEST)}


def false_commitment(message):
    first, *rest = message.sent
    return {"sent": (SentDigest(direction=first.direction, microbatch=first.microbatch, digest=OTHER_DIGEST), *rest)}


def forged_input(message):
    first, *rest = message.received
    values = json.loads(first.header) | {"payload_digest": OTHER_DIGEST}
    header = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return {"received": (PassedOnHeader(header=header, signature=first.signature), *rest)}


def missing_input(message):
    return {"received": message.received[1:]}


def other_gradient(outgoing, message):
    if message.purpose != "gradient" or message.step != 1:
        return [outgoing]
    return [type(outgoing)(outgoing.receiver, message, bytes(len(outgoing.payload)))]


def false_state(message):
    lies = {name: {"weights": state.weights[:-64] + OTHER_DIGEST} for name, state in message.states.items()}
    return {"states": {name: state.model_copy(update=lies[name]) for name, state in message.states.items()}}


@dataclass(frozen=True)
class Scene:
    """Which worker does what, what it is found guilty of, and what is left to believe."""

    actors: dict[str, Actor]
    guilty: str
    offence: str
    believed: str


SCENES = {
    "forward": Scene({"worker-1": flip("forward")}, "worker-1", "message", "that the plan"),
    "backward": Scene({"worker-2": flip("backward")}, "worker-2", "message", "that the plan"),
    "accusation": Scene({"worker-2": at_step_1(AuditReport, false_report)}, "worker-2", "accusation", "that the plan"),
    "equivocation": Scene({"worker-1": at_step_1(Commit, false_commitment)}, "worker-1", "equivocation", "nothing"),
    "forged input": Scene({"worker-1": at_step_1(Commit, forged_input)}, "worker-1", "forgery", "nothing"),
    "missing input": Scene({"worker-1": at_step_1(Commit, missing_input)}, "worker-1", "forgery", "nothing"),
    "shape": Scene(
        {"worker-1": at_step_1(Activation, lambda message: {"dtype": "float16"})}, "worker-1", "shape", "that the plan"
    ),
    "gradient": Scene(
        {"worker-1": at_step_1(Commit, lambda message: {"gradient": OTHER_DIGEST})}, "worker-1", "gradient", "nothing"
    ),
    "gradient norm": Scene(
        {"worker-1": Actor(rewrite=rewrite_only(Bulk, other_gradient))}, "worker-1", "gradient", "that the plan"
    ),
    "state": Scene({"worker-1": at_step_1(UpdateReport, false_state)}, "worker-1", "state", "that the plan"),
}


@pytest.fixture(scope="module")
def evidence_of(tmp_path_factory, model_cache):
    """Run each scene once; give the evidence of its one verdict."""
    known = {}

    def evidence(name):
        if name not in known:
            directory = tmp_path_factory.mktemp("run")
            run = tiny_run(guard=GuardConfig(audit_rate=1.0, screen=False))
            with MemoryCompany(run, directory, SCENES[name].actors, cache=model_cache) as company:
                company.run(3)
                (verdict,) = company.verdicts
            known[name] = (directory / "run", verdict)
        return known[name]

    return evidence


@pytest.fixture
def altered(evidence_of, tmp_path):
    """A copy of the evidence of a forward lie, to be altered; the digest of the tensors is put right again."""
    home, verdict = evidence_of("forward")
    source = home / verdict.evidence
    for path in (source, source.with_suffix(".safetensors")):
        shutil.copy(path, tmp_path / path.name)

    def alter(record=lambda record: None, tensors=lambda tensors: None):
        path = tmp_path / source.name
        beside = path.with_suffix(".safetensors")
        held = load_file(beside)
        before = {name: tensor.clone() for name, tensor in held.items()}
        tensors(held)
        if held.keys() != before.keys() or any(not held[name].equal(before[name]) for name in held):
            save_file(held, beside)
        values = json.loads(path.read_text())
        values["tensors"]["sha256"] = hashlib.sha256(beside.read_bytes()).hexdigest()
        record(values)
        path.write_text(json.dumps(values))
        return path

    return alter


@pytest.mark.quick_cases("forward", "state", "gradient", "equivocation", "accusation")
@pytest.mark.parametrize("name", SCENES)
def test_evidence_of_every_offence_holds_for_an_outsider(evidence_of, name):
    scene = SCENES[name]
    home, verdict = evidence_of(name)

    explained = explain_evidence(home / verdict.evidence, home / "pki" / "authority.pem")

    assert (verdict.party, verdict.offence) == (scene.guilty, scene.offence)
    assert explained["verdict"] == f"{scene.guilty} is guilty: {scene.offence}"
    assert explained["rests on the owner's word"].startswith(scene.believed)
    assert explained["conclusion"].startswith("holds: ")
    assert explained["authority"].startswith("as given")
    assert explained["file"] == f"SHA-256 {verdict.evidence_sha256}"


@pytest.mark.parametrize("name", ["forward", "backward", "accusation"])
def test_a_disputed_microbatch_is_redone_from_the_evidence_bit_for_bit(evidence_of, name):
    home, verdict = evidence_of(name)

    explained = explain_evidence(home / verdict.evidence)

    assert explained["recomputed here"] == "bit-equal to the referee's result"
    assert explained["weights"] == "their digest was signed by worker-1 and worker-2" or name == "backward"
    assert explained["authority"].startswith("not compared")


def test_without_weights_it_says_what_is_left_to_believe(altered):
    def drop(tensors):
        for name in [name for name in tensors if name.startswith("stage/")]:
            del tensors[name]

    explained = explain_evidence(altered(tensors=drop))

    assert explained["recomputed here"].startswith("no: ")
    assert "the recomputed tensor" in explained["rests on the owner's word"]


def nudge(name):
    def change(tensors):
        tensors[name] = tensors[name].clone()
        tensors[name].view(-1)[0] += 1.0

    return change


def replaced_by(name, other):
    return lambda tensors: tensors.update({name: tensors[other].clone()})


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (nudge("claimed"), "'claimed' differs from the digest that worker-1 signed"),
        (nudge("input"), "'input' differs from the digest that owner signed"),
        (nudge("recomputed"), "says distance"),
        (replaced_by("recomputed", "claimed"), "it is not guilty"),
        (lambda tensors: tensors.pop("recomputed"), "'recomputed' is missing"),
        (lambda tensors: tensors.update(recomputed=tensors["recomputed"][:1].clone()), "has not the plan's shape"),
        (lambda tensors: tensors["claimed"].fill_(float("nan")), "'claimed' differs from the digest"),
    ],
)
def test_an_altered_tensor_is_found_although_its_file_digest_was_put_right(altered, change, complaint):
    path = altered(tensors=change)

    with pytest.raises(EvidenceError, match=complaint):
        explain_evidence(path)


def test_a_referee_who_made_up_the_truth_is_found(altered):
    path = altered(tensors=nudge("recomputed"))
    tensors = load_file(path.with_suffix(".safetensors"))
    record = json.loads(path.read_text())
    record["verdict"]["distance"] = token_distance(tensors["claimed"], tensors["recomputed"])
    path.write_text(json.dumps(record))

    with pytest.raises(EvidenceError, match="recomputed here, the message is"):
        explain_evidence(path)


def test_altered_weights_are_found(altered):
    def change(tensors):
        name = min(name for name in tensors if name.startswith("stage/"))
        nudge(name)(tensors)

    with pytest.raises(EvidenceError, match="weights differ from their signed digest"):
        explain_evidence(altered(tensors=change))


def test_a_swapped_tensor_file_is_found(altered):
    path = altered()
    save_file({"input": torch.zeros(1)}, path.with_suffix(".safetensors"))

    with pytest.raises(EvidenceError, match="altered or swapped"):
        explain_evidence(path)


def setting(*keys, to):
    def change(record):
        for key in keys[:-1]:
            record = record[key]
        record[keys[-1]] = to

    return change


def swap_headers(record):
    record["headers"]["output"] = record["headers"]["input_forward"]


def break_signature(record):
    signature = record["headers"]["output"]["signature"]
    record["headers"]["output"]["signature"] = signature[:-1] + ("0" if signature[-1] != "0" else "1")


def rewrite_header(record):
    header = record["headers"]["output"]
    header["header"] = header["header"].replace('"microbatch":', '"microbatch":1')


def claim_a_gradient(record):
    # a lie in the forward pass makes a wrong gradient too, and nothing here is about that
    record["verdict"]["offence"] = "gradient"


def swap_certificates(record):
    certificates = record["certificates"]
    certificates["worker-1"], certificates["worker-2"] = certificates["worker-2"], certificates["worker-1"]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (swap_headers, "is about"),
        (break_signature, "'output' is invalid"),
        (rewrite_header, "'output' is invalid"),
        (swap_certificates, "belongs to 'worker-2'"),
        (lambda record: record["headers"].pop("output"), "lacks the signed header for 'output'"),
        (lambda record: record["certificates"].pop("worker-1"), "worker-1"),
        (setting("verdict", "party", to="worker-2"), "the wrong party is named"),
        (setting("verdict", "party", to="worker-9"), "lacks the certificate of 'worker-9'"),
        (setting("verdict", "party", to="owner"), "accuses the owner"),
        (setting("session", to="another"), "belongs to another session"),
        (setting("verdict", "offence", to="accusation"), "the wrong party is named"),
        (claim_a_gradient, "lacks the signed header for 'commit'"),
        (setting("verdict", "stage", to=2), "is about"),
        (setting("verdict", "step", to=2), "is about"),
        (setting("verdict", "microbatch", to=None), "no direction or no microbatch"),
        (setting("verdict", "direction", to=None), "no direction or no microbatch"),
        (setting("verdict", "direction", to="sideways"), "verdict.direction: Input should be 'forward' or 'backward'"),
        (setting("verdict", "distance", to=0.5), "says distance 0.5"),
        (setting("weights_digest", to="00" * 64), "signed other weights"),
        (setting("plan", "hidden_size", to=32), "has not the plan's shape"),
        (setting("plan", "hub_config", "n_embd", to=2**20), "plan"),
        (setting("plan", "hub_config", "model_type", to="no-such"), "plan builds no stage"),
        (setting("plan", "guard", "shadow", to="update"), 'shadow = "update" was removed'),
    ],
)
def test_an_altered_record_is_found(altered, change, complaint):
    path = altered(record=change)

    with pytest.raises(EvidenceError, match=complaint):
        explain_evidence(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda record: record.update(surprise=1),
        lambda record: record.pop("plan"),
        setting("format", to=2),
        setting("verdict", "offence", to="being late"),
        setting("tensors", "file", to="../claimed.safetensors"),
        setting("tensors", "file", to="/etc/hostname.safetensors"),
        setting("tensors", "file", to="sub/claimed.safetensors"),
        setting("tensors", "sha256", to="0"),
        setting("headers", to=[]),
        setting("session", to=""),
    ],
)
def test_a_malformed_record_is_refused(altered, change):
    path = altered(record=change)

    with pytest.raises(EvidenceError, match="not evidence of this version"):
        explain_evidence(path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"a": NaN}'])
def test_what_is_no_json_object_is_refused(tmp_path, content):
    path = tmp_path / "evidence.json"
    path.write_bytes(content)

    with pytest.raises(EvidenceError, match="not evidence"):
        explain_evidence(path)


def test_missing_files_are_named(altered, tmp_path):
    path = altered()
    path.with_suffix(".safetensors").unlink()

    with pytest.raises(EvidenceError, match=r"\.safetensors: cannot be read .*keep both files together"):
        explain_evidence(path)
    with pytest.raises(EvidenceError, match=r"gone\.json: cannot be read"):
        explain_evidence(tmp_path / "gone.json")


@pytest.mark.parametrize(("suffix", "limit"), [(".json", MAX_RECORD_BYTES), (".safetensors", MAX_TENSOR_BYTES)])
def test_a_huge_file_is_refused_unread(altered, suffix, limit):
    path = altered()
    with path.with_suffix(suffix).open("r+b") as file:
        file.truncate(limit + 1)

    with pytest.raises(EvidenceError, match="larger than"):
        explain_evidence(path)


def test_weights_of_a_large_stage_are_in_the_evidence_whole_and_for_its_owner_alone(tmp_path):
    large = torch.zeros(2**24 + 1)
    large[-1] = 1.0
    path = tmp_path / "case.safetensors"

    file = write_tensors(path, {"stage/weight": large, "stage/part": large[-2:]})
    tensors = read_tensors(tmp_path, file)

    assert path.stat().st_size > 64 * 2**20 and path.stat().st_mode & 0o777 == 0o600
    assert torch.equal(tensors["stage/weight"], large) and tensors["stage/part"].tolist() == [0.0, 1.0]


def claiming(**keys):
    """A plan with a model of other counts, cut at its last layer as before."""

    def claim(record):
        record["plan"]["hub_config"] |= keys
        layers = keys.get("n_layer", 0)
        if layers:
            record["plan"]["stages"][-1]["end_layer"] = layers

    return claim


@pytest.mark.parametrize("key", ["n_layer", "num_hidden_layers", "num_labels"])
@pytest.mark.parametrize("claimed", [MAX_LAYERS + 1, 10**15])
def test_a_plan_that_claims_more_layers_than_any_model_has_is_refused_before_one_is_built(
    altered, monkeypatch, key, claimed
):
    def build(*about):
        raise AssertionError("built")

    path = altered(record=claiming(**{key: claimed}))
    monkeypatch.setattr("phalanx.pipeline.evidence.recompute.shared_hub_config", build)

    with pytest.raises(
        EvidenceError, match=f"its plan claims {claimed} layers or labels, above the limit of {MAX_LAYERS}"
    ):
        explain_evidence(path)


def test_as_many_layers_as_may_be_are_built_without_memory_and_then_counted(altered, monkeypatch):
    monkeypatch.setattr("phalanx.pipeline.evidence.recompute.MAX_LAYERS", 12)
    longer = altered(record=claiming(n_layer=12))

    # the middle stage is the same, whatever comes behind it
    assert explain_evidence(longer)["recomputed here"] == "bit-equal to the referee's result"


def test_the_run_itself_builds_what_is_too_long_for_others(altered, monkeypatch):
    monkeypatch.setattr("phalanx.pipeline.evidence.recompute.MAX_LAYERS", 1)

    facts = judge_evidence(altered(), Pins(in_run=True))

    assert str(facts["conclusion"]).startswith("holds: worker-1")


def test_the_run_itself_reads_what_is_too_large_for_others(altered):
    path = altered()
    padded = path.read_text() + " " * MAX_RECORD_BYTES
    path.write_text(padded)

    with pytest.raises(EvidenceError, match="larger than"):
        explain_evidence(path)
    facts = judge_evidence(path, Pins(in_run=True))

    assert str(facts["conclusion"]).startswith("holds: worker-1")


def test_evidence_of_another_session_than_the_reader_knows_is_refused(altered):
    path = altered()
    session = json.loads(path.read_text())["session"]

    with pytest.raises(EvidenceError, match="expected 'another'"):
        explain_evidence(path, session="another")
    assert explain_evidence(path, session=session)["session"] == f"{session}, as given"


def test_garbage_in_place_of_tensors_is_refused(altered):
    path = altered()
    beside = path.with_suffix(".safetensors")
    beside.write_bytes(b"\xff" * 64)
    record = json.loads(path.read_text())
    record["tensors"]["sha256"] = hashlib.sha256(beside.read_bytes()).hexdigest()
    path.write_text(json.dumps(record))

    with pytest.raises(EvidenceError, match="not a safetensors file"):
        explain_evidence(path)


def test_the_authority_that_the_reader_knows_is_compared(altered, tmp_path):
    create_authority(tmp_path / "other")

    with pytest.raises(EvidenceError, match="was certified by the authority"):
        explain_evidence(altered(), tmp_path / "other" / "authority.pem")
    with pytest.raises(EvidenceError, match="cannot be read"):
        explain_evidence(altered(), tmp_path / "nobody.pem")


def test_a_certificate_of_another_authority_is_refused(altered, tmp_path):
    create_authority(tmp_path / "other")
    foreign = (issue_certificate(tmp_path / "other", "worker-1") / "certificate.pem").read_text()

    with pytest.raises(EvidenceError, match="certificate of 'worker-1'"):
        explain_evidence(altered(record=setting("certificates", "worker-1", to=foreign)))


def test_an_accusation_without_its_report_is_not_believed(evidence_of, tmp_path):
    home, verdict = evidence_of("accusation")
    source = home / verdict.evidence
    record = json.loads(source.read_text())
    del record["headers"]["report"]
    path = tmp_path / source.name
    path.write_text(json.dumps(record))
    shutil.copy(source.with_suffix(".safetensors"), path.with_suffix(".safetensors"))

    with pytest.raises(EvidenceError, match="lacks the signed header for 'report'"):
        explain_evidence(path)
