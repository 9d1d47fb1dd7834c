"""Forged passports: by outsiders without keys, and by the owner, who can sign all of its own statements anew."""

import copy
import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from forger import MODEL, SMALL, Forger, payload_of, raw_bundle
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from phalanx.governance.passport import hash_members, write_bundle
from phalanx.governance.statements import ModelFiles
from phalanx.security.crypto import Identity
from phalanx.verifier.bundle import SEAL
from phalanx.verifier.forms import RefusedError, canonical, digest, in_domain, sha256, shard_leaf, shard_root
from phalanx.verifier.log import verify
from phalanx.verifier.passport import list_draws, verify_passport
from phalanx.verifier.statement import digest_weights

OWNER = Forger().owner.public.public_key.hex()
EVENTS, LEAVES = "log/events.jsonl", "log/steps.jsonl"
PROVENANCE, BOM, SIGNATURE = "provenance.dsse.json", "bom.cdx.json", "model/model.sig"
EVALUATION, MANIFEST = "tests/evaluation.dsse.json", "data/dataset.json"


def name_in(forger: Forger, folder: str) -> str:
    return max(name for name in forger.members if name.startswith(folder))


def test_the_honest_passport_holds_with_its_model() -> None:
    found = verify_passport(SMALL, OWNER, model=MODEL)

    assert found.doubts == []
    assert found.rows["convicted"] == "worker-1"
    # an owner chooses the rates: of how much was audited, the number of drawn steps says nothing
    signed = found.facts["audits"]["signed"]
    assert signed > 0
    assert found.rows["audits"].startswith("6 of 6 steps")
    assert found.rows["audits"].endswith(f"; {signed} microbatches are signed by stage and auditor")
    assert "tensors have the digest that the run signed" in found.rows["model's files"]


# --- outsiders: everything that they change is under the owner's seal ---------------------------------------


def swap_members(forger: Forger) -> None:
    names = sorted(name for name in forger.members if name.startswith("checkpoints/"))
    forger.members |= {names[0]: forger.members[names[1]], names[1]: forger.members[names[0]]}


def cut_last_line(forger: Forger) -> None:
    rows = forger.members[EVENTS].splitlines(keepends=True)
    forger.members[EVENTS] = b"".join(rows[:-1])


OUTSIDERS: dict[str, Callable[[Forger], object]] = {
    "a line of the log is changed": lambda f: f.members.update(
        {EVENTS: f.members[EVENTS].replace(b"worker-1", b"worker-2")}
    ),
    "the log is cut": cut_last_line,
    "leaves are cut": lambda f: f.members.update({LEAVES: f.members[LEAVES][:-100]}),
    "the evidence is taken out": lambda f: f.members.pop(name_in(f, "evidence/")),
    "the evaluation is taken out": lambda f: f.members.pop(EVALUATION),
    "a file is put in": lambda f: f.members.update({"tests/better.dsse.json": f.members[EVALUATION]}),
    "two manifests are swapped": swap_members,
    "the run file is another": lambda f: f.members.update({PROVENANCE: f.members[PROVENANCE] + b" "}),
    "the certificate has a blank more": lambda f: f.members.update(
        {"certificates/owner.pem": f.members["certificates/owner.pem"] + b"\n"}
    ),
}


@pytest.mark.parametrize("name", OUTSIDERS)
def test_an_outsider_cannot_change_a_member(name: str, tmp_path: Path) -> None:
    forger = Forger()
    OUTSIDERS[name](forger)

    with pytest.raises(RefusedError):
        verify_passport(forger.write_with_old_seal(tmp_path / "forged"))


def test_another_owners_seal_is_refused(tmp_path: Path) -> None:
    """With an identity of its own a forger can seal, but then neither log nor certificates are that identity's."""
    forger, stranger = Forger(), Identity.without_certificate("owner")
    forger.signer._owner = stranger

    with pytest.raises(RefusedError, match=SEAL):
        verify_passport(forger.write_sealed(tmp_path / "forged"))


def test_another_run_of_another_owner_is_not_the_expected_one() -> None:
    with pytest.raises(RefusedError, match="the owner's key is"):
        verify_passport(SMALL, "0" * 64)


@pytest.mark.parametrize("kind", ["cut", "longer", "twice", "order", "padding", "time", "no seal", "unknown name"])
def test_a_bundle_in_another_form_is_refused(kind: str, tmp_path: Path) -> None:
    forger = Forger()
    members = [*sorted(forger.members.items()), (SEAL, forger.seal)]
    data = bytearray(SMALL.read_bytes())
    assert raw_bundle(members) == data
    if kind == "cut":
        del data[-512:]
    elif kind == "longer":
        data += b"\0" * 512
    elif kind == "twice":
        data = bytearray(raw_bundle([members[0], *members]))
    elif kind == "order":
        data = bytearray(raw_bundle([members[1], members[0], *members[2:]]))
    elif kind == "padding":
        data[512 + len(members[0][1])] = 1
    elif kind == "time":
        data[140] = ord("1")
    elif kind == "no seal":
        data = bytearray(raw_bundle(members[:-1]))
    else:
        data = bytearray(raw_bundle([("a.html", b"<script>"), *members]))
    (tmp_path / "forged").write_bytes(data)

    with pytest.raises(RefusedError):
        verify_passport(tmp_path / "forged")


# --- the owner: it signs and seals all of its own anew -------------------------------------------------------


def drop_line(kind: str) -> Callable[[Forger], None]:
    def drop(forger: Forger) -> None:
        lines = forger.lines
        last = max(number for number, line in enumerate(lines) if line["kind"] == kind)
        forger.write_log(lines[:last] + lines[last + 1 :])

    return drop


def change_line(kind: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Forger], None]:
    def apply(forger: Forger) -> None:
        lines = forger.lines
        change(next(line["body"] for line in reversed(lines) if line["kind"] == kind))
        forger.write_log(lines)

    return apply


def change_leaf(kind: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Forger], None]:
    def change_leaves(leaves: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for leaf in leaves:
            if leaf["leaf"] == kind:
                change(leaf)
        return leaves

    return lambda forger: forger.write_log(forger.lines, change_leaves)


def drop_leaves(kind: str) -> Callable[[Forger], None]:
    return lambda forger: forger.write_log(
        forger.lines, lambda leaves: [leaf for leaf in leaves if leaf["leaf"] != kind]
    )


def lighten_header(leaf: dict[str, Any]) -> None:
    """The owner rewrites what a worker reported."""
    if leaf["report"] is not None:
        leaf["report"]["header"] = leaf["report"]["header"].replace('"microbatch":', '"microbatch": ')


def state(**facts: Any) -> Callable[[Forger], None]:
    return lambda forger: forger.facts.update(facts)


def change_fact(name: str, **values: Any) -> Callable[[Forger], None]:
    return lambda forger: forger.facts[name].update(values)


def other_model(forger: Forger) -> None:
    """Sign another model and say so in the seal; the other statements are of the old one."""
    files = ModelFiles("model", "", {"config.json": "1" * 64})
    files = ModelFiles("model", sha256(bytes.fromhex("1" * 64)), files.digests)
    forger.members[SIGNATURE] = forger.signer.sign_model(files)
    forger.facts["model"]["root"] = files.root


def foreign_signature(forger: Forger) -> None:
    stranger = Forger()
    stranger.signer._key = ec.generate_private_key(ec.SECP256R1())
    statement = payload_of(json.dumps(json.loads(forger.members[SIGNATURE])["dsseEnvelope"]).encode())
    digests = {row["name"]: row["digest"] for row in statement["predicate"]["resources"]}
    files = ModelFiles("model", forger.facts["model"]["root"], digests)
    forger.members[SIGNATURE] = stranger.signer.sign_model(files)


def in_statement(name: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Forger], None]:
    return lambda forger: forger.change_statement(name, change)


def in_json(name: str, change: Callable[[Any], object]) -> Callable[[Forger], None]:
    return lambda forger: forger.change_json(name, change)


def in_notes(change: Callable[[dict[str, Any]], object]) -> Callable[[Forger], None]:
    return in_statement(EVALUATION, lambda s: change(s["predicate"]["configuration"][0]["annotations"]))


def older_manifest(forger: Forger) -> None:
    """The manifest of the older checkpoint in the place of the newest one, signed anew with its step."""
    old, new = sorted(name for name in forger.members if name.startswith("checkpoints/"))
    body = json.loads(forger.members[old])["body"]
    body["step"] = json.loads(forger.members[new])["body"]["step"]
    forger.members[new] = forger.sign_manifest(body)


def change_manifest(**values: Any) -> Callable[[Forger], None]:
    def change(forger: Forger) -> None:
        name = name_in(forger, "checkpoints/")
        forger.members[name] = forger.sign_manifest({**json.loads(forger.members[name])["body"], **values})

    return change


def foreign_evidence(forger: Forger) -> None:
    """Evidence of another session, whose digest the owner writes into the log."""
    name = name_in(forger, "evidence/")
    record = json.loads(forger.members[name])
    record["session"] = record["session"][:-1] + ("0" if record["session"][-1] != "0" else "1")
    put_evidence(forger, name, record)


def blame_other(forger: Forger) -> None:
    name = name_in(forger, "evidence/")
    record = json.loads(forger.members[name])
    record["verdict"]["party"] = "worker-2"
    put_evidence(forger, name, record)


def put_evidence(forger: Forger, name: str, record: dict[str, Any]) -> None:
    forger.members[name] = canonical(record)
    lines = forger.lines
    for line in lines:
        if line["kind"] == "verdict":
            line["body"]["evidence_sha256"] = sha256(forger.members[name])
            forger.facts["verdicts"][0]["evidence_sha256"] = line["body"]["evidence_sha256"]
    forger.write_log(lines)


def swap_dataset(forger: Forger) -> None:
    """A dataset of another recipe, signed by somebody, with a seal that names it."""
    signer = Identity.without_certificate("signer")
    body = json.loads(forger.members[MANIFEST])["body"]
    body["recipe"] = {"content": "other\n", "digest": sha256(b"other\n")}
    statement = {
        "dataset": sha256(canonical(body)),
        "documents": body["documents"],
        "index": body["index"]["root"],
        "parts": [[part["group"], part["split"]] for part in body["parts"]],
    }
    forger.members[MANIFEST] = canonical(
        {
            "body": body,
            "index_signature": signer.sign_data(in_domain("dataset-index/1", canonical(statement))).hex(),
            "signature": signer.sign_data(in_domain("dataset-manifest/1", canonical(body))).hex(),
            "signer": signer.public.public_key.hex(),
        }
    )
    forger.facts["dataset"] = statement["dataset"]


def cheaper_licence(bom: dict[str, Any]) -> None:
    source = next(part for part in bom["components"] if part["name"] == "bought")
    source["licenses"] = [{"license": {"name": "CC0-1.0"}}]


def hide_source(bom: dict[str, Any]) -> None:
    bom["components"] = [part for part in bom["components"] if part["name"] != "bought"]


def foreign_export(forger: Forger) -> None:
    put_export(forger, run="another")


def put_export(forger: Forger, **source: Any) -> None:
    step = max(json.loads(forger.members[name])["body"]["step"] for name in forger.members if "checkpoints/" in name)
    manifest = sha256(forger.members[f"checkpoints/step-{step:08}.json"])
    facts = {"run": forger.facts["run"], "step": step, "checkpoint": manifest, "files": {}}
    facts |= {"weights": forger.facts["model"]["weights"], **source}
    predicate = {"format": "gguf", "precision": "f16", "state": "checked", "source": facts}
    statement = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": "model.gguf", "digest": {"sha256": "0" * 64}}],
        "predicateType": "urn:phalanx:edge-export:1",
        "predicate": predicate,
    }
    from phalanx.governance.statements import _wrap_payload
    from phalanx.verifier.statement import signed_bytes

    signer, payload = Identity.without_certificate("signer"), canonical(statement)
    envelope = _wrap_payload(payload, {signer.fingerprint: signer.sign_data(signed_bytes(payload))})
    forger.members["exports/edge.dsse.json"] = canonical(envelope)


def begin_again(kind: str) -> Callable[[Forger], None]:
    """Steps that nobody has audited, behind an opening that says that they are done."""

    def change(forger: Forger) -> None:
        lines = forger.lines
        last = max(number for number, line in enumerate(lines) if line["kind"] == "step")
        opening = copy.deepcopy(lines[0])
        opening["kind"], opening["body"]["step"] = kind, opening["body"]["steps"]
        write_honest_audits(forger, [*lines[:last], opening, *lines[last + 1 :]])

    return change


def begin_late(forger: Forger) -> None:
    lines = forger.lines
    first = next(number for number, line in enumerate(lines) if line["kind"] == "step" and line["body"]["step"] == 3)
    lines[0]["body"]["step"] = 3
    write_honest_audits(
        forger, [line for line in lines[:first] if line["kind"] not in ("step", "rolled_back")] + lines[first:]
    )


def write_honest_audits(forger: Forger, lines: list[dict[str, Any]]) -> None:
    """Write the log, and let the seal name the audits and draws that it has."""
    forger.write_log(lines)
    events, leaves = (forger.members[name] for name in (EVENTS, LEAVES))
    with tempfile.TemporaryDirectory() as home:
        (Path(home) / "events.jsonl").write_bytes(events)
        (Path(home) / "steps.jsonl").write_bytes(leaves)
        try:
            log = verify(Path(home), forger.members["certificates/owner.pem"].decode())
        except RefusedError:
            return
    forger.facts["draws"] = list_draws(log)
    forger.facts["audits"] = {"recorded": len(log.recorded), "proven": len(log.proven), "signed": log.audits}


def other_index(forger: Forger) -> None:
    """The signer of the data signs a second index of the same dataset, in which a document is missing."""
    signer = Identity.without_certificate("signer")
    body = json.loads(forger.members[MANIFEST])["body"]
    parts = [[part["group"], part["split"]] for part in body["parts"]]
    true = {"dataset": forger.facts["dataset"], "documents": body["documents"], "index": body["index"]["root"]}
    records = [bytes.fromhex(digit * 64).ljust(64, b"\0") for digit in "0f"]
    nodes = [shard_leaf(record) for record in records]
    false = {**true, "documents": 2, "index": shard_root(nodes).hex()}
    signed = [
        signer.sign_data(in_domain("dataset-index/1", canonical({**statement, "parts": parts}))).hex()
        for statement in (true, false)
    ]
    envelope = {"index_signature": signed[0], "signer": signer.public.public_key.hex(), "body": body}
    envelope["signature"] = signer.sign_data(in_domain("dataset-manifest/1", canonical(body))).hex()
    forger.members[MANIFEST] = canonical(envelope)
    proof = {
        "format": "phalanx-document-proof",
        "version": 1,
        "digest": "7" * 64,
        "leaves": [
            {"number": number, "path": [nodes[1 - number].hex()], "record": record.hex()}
            for number, record in enumerate(records)
        ],
        "signature": signed[1],
        "signer": signer.public.public_key.hex(),
        "statement": {**false, "parts": parts},
    }
    del forger.members[name_in(forger, "lineage/")]
    forger.members[f"lineage/{'7' * 64}.proof.json"] = canonical(proof) + b"\n"


OWNERS: dict[str, Callable[[Forger], object]] = {
    # the log
    "the last step has no record": drop_line("step"),
    "the verdict is left out": drop_line("verdict"),
    "the first session is left out": drop_line("run_started"),
    "a shortened log": lambda f: f.write_log(f.lines[:-2]),
    "the end of the run is left out": drop_line("run_completed"),
    "another audit key is told": change_line("audit_key_revealed", lambda body: body.update(key="00" * 32)),
    "other final weights": change_line("run_completed", lambda body: body.update(final_weights_digest="0" * 64)),
    "a step counts twice": lambda f: f.write_log([*f.lines[:5], f.lines[4], *f.lines[5:]]),
    "steps that a second run_started leaves out": begin_again("run_started"),
    "steps that a run_resumed leaves out": begin_again("run_resumed"),
    "the first steps are left out": begin_late,
    "other rates of audits": change_line("run_started", lambda body: body["guard"].update(audit_rate=1.0)),
    "another run file": change_line("run_started", lambda body: body.update(config_digest="0" * 64)),
    "another corpus": change_line("run_started", lambda body: body.update(corpus="0" * 64)),
    "an audit is left out": drop_leaves("audit"),
    "a draw is left out": drop_leaves("draw"),
    "a commitment is left out": drop_leaves("commit"),
    "a report of a worker is rewritten": change_leaf("audit", lighten_header),
    "an auditor is another": change_leaf("audit", lambda leaf: leaf.update(auditor="worker-1")),
    "steps of a foreign session": change_leaf("attempt", lambda leaf: leaf.update(session=leaf["session"] + "0")),
    # the seal
    "a re-signed head": state(log={"num_events": 1, "digest": "0" * 64}),
    "the seal of another run": state(run="0" * 32),
    "more audits than were made": change_fact("audits", proven=600),
    "nobody was convicted": state(verdicts=[]),
    "the seal states other draws": lambda f: f.facts["draws"][0].update(revealed=False),
    "the seal states other weights": state(weights="0" * 64),
    # the model and where it comes from
    "another model": other_model,
    "a foreign signature of the model": foreign_signature,
    "other weights than the run's": change_fact("model", weights="0" * 64),
    "a step without a checkpoint": change_fact("model", step=4),
    "provenance of another run": in_statement(
        PROVENANCE, lambda s: s["predicate"]["runDetails"]["metadata"].update(invocationId="another")
    ),
    "provenance with another run file": in_statement(
        PROVENANCE,
        lambda s: s["predicate"]["buildDefinition"]["externalParameters"]["run_file"]["train"].update(seed=4),
    ),
    "provenance with other data": in_statement(
        PROVENANCE, lambda s: s["predicate"]["buildDefinition"].update(resolvedDependencies=[])
    ),
    "provenance of another model": in_statement(
        PROVENANCE, lambda s: s["subject"][0]["digest"].update(sha256="0" * 64)
    ),
    # tests
    "a swapped evaluation": in_statement(EVALUATION, lambda s: s["subject"][0]["digest"].update(sha256="0" * 64)),
    "an evaluation of other weights": in_notes(lambda notes: notes.update(weights="0" * 64)),
    "an evaluation of another run": in_notes(lambda notes: notes.update(run="another")),
    "a better figure": in_notes(lambda notes: notes["figures"].update({"notes.perplexity": "1.0"})),
    "a failed attack passes": in_statement("tests/redteam.dsse.json", lambda s: s["predicate"].update(result="PASSED")),
    # bill of materials and data
    "a better figure in the bill": in_json(
        BOM,
        lambda b: b["metadata"]["component"]["modelCard"]["quantitativeAnalysis"]["performanceMetrics"][0].update(
            value="1.0"
        ),
    ),
    "a bill of another model": in_json(BOM, lambda b: b["metadata"]["component"]["hashes"][0].update(content="0" * 64)),
    "a cheaper licence": in_json(BOM, cheaper_licence),
    "a hidden source": in_json(BOM, hide_source),
    "another dataset": swap_dataset,
    # checkpoints, evidence, exports, documents
    "an older manifest": older_manifest,
    "a manifest of another run": change_manifest(run="another"),
    "a manifest that knows other lines": change_manifest(audit_log={"num_events": 3, "digest": "0" * 64}),
    "evidence of a foreign session": foreign_evidence,
    "evidence against another": blame_other,
    "an export of another run": foreign_export,
    "an export of another checkpoint": lambda f: put_export(f, checkpoint="0" * 64),
    "an export of other weights": lambda f: put_export(f, weights="0" * 64),
    "a proof by another index of the data": other_index,
    "a proof about another document": lambda f: f.change_json(
        name_in(f, "lineage/"), lambda proof: proof.update(digest="0" * 64)
    ),
}


@pytest.mark.parametrize("name", OWNERS)
def test_what_the_owner_forges_is_refused(name: str, tmp_path: Path) -> None:
    forger = Forger()
    before = copy.deepcopy((forger.members, forger.facts))
    OWNERS[name](forger)
    assert (forger.members, forger.facts) != before

    with pytest.raises(RefusedError):
        verify_passport(forger.write_sealed(tmp_path / "forged"), OWNER)


def empty_run_file(forger: Forger) -> None:
    """Signs a run file whose section is a list, with its digest in log and provenance."""
    run_file: dict[str, Any] = {"data": []}
    forger.change_statement(
        PROVENANCE, lambda s: s["predicate"]["buildDefinition"]["externalParameters"].update(run_file=run_file)
    )
    change_line("run_started", lambda body: body.update(config_digest=sha256(canonical(run_file))))(forger)


@pytest.mark.parametrize("forge", [empty_run_file, lambda forger: forger.facts["model"].pop("has_plain_names")])
def test_what_is_malformed_is_refused_by_name(forge: Callable[[Forger], Any], tmp_path: Path) -> None:
    forger = Forger()
    forge(forger)

    with pytest.raises(RefusedError, match="malformed: "):
        verify_passport(forger.write_sealed(tmp_path / "forged"), OWNER, model=MODEL)


def test_an_honest_passport_that_is_sealed_anew_holds(tmp_path: Path) -> None:
    """So that each refusal above is of its forgery, not of the sealing."""
    forger = Forger()
    forger.write_log(forger.lines)
    put_export(forger)

    assert verify_passport(forger.write_sealed(tmp_path / "anew"), OWNER, model=MODEL).doubts == []


def rewrite_history(forger: Forger) -> None:
    """Take every trace of the conviction out of log, seal and evidence; all of it is signed by the owner alone."""
    gone = ("verdict", "evicted", "alarm", "screen_hit", "takeover")
    forger.write_log([line for line in forger.lines if line["kind"] not in gone])
    forger.facts["verdicts"] = []
    for name in [name for name in forger.members if name.startswith("evidence/")]:
        del forger.members[name]


def kept_head(forger: Forger, count: int) -> bytes:
    """The public head that a worker kept after so many lines that it knows of, all of them on the owner's disk."""
    kinds = ("run_started", "run_resumed", "step", "evicted", "run_completed")
    rows = [row for row in forger.members[EVENTS].splitlines() if json.loads(row)["kind"] in kinds]
    entry = {"number": count, "digest": digest(rows[count - 1])}
    head = {"boot": None, "forced": entry, "last": entry, "run": forger.facts["run"]}
    signature = forger.owner.sign_data(in_domain("log-public-head/1", canonical(head))).hex()
    return canonical({**head, "signature": signature})


def test_another_history_is_refused_by_whoever_knows_a_head_of_the_first(tmp_path: Path) -> None:
    """The owner alone could write its log anew; that is what heads in the hands of others are for."""
    forger = Forger()
    heads = [kept_head(forger, count) for count in (2, 5, 10)]
    assert verify_passport(SMALL, OWNER, heads=heads).rows["heads that others kept"] == "3, all in the log"
    rewrite_history(forger)
    path = forger.write_sealed(tmp_path / "forged")

    alone = verify_passport(path, OWNER)

    assert any("wrote no other log is its word" in remark for remark in alone.remarks)
    assert "that figures of tests are what was measured is the owner's word" in alone.remarks
    assert verify_passport(path, OWNER, heads=heads[:1]).rows["convicted"] == "nobody"
    with pytest.raises(RefusedError, match="lacks public line"):
        verify_passport(path, OWNER, heads=heads)


def test_a_head_of_another_run_or_of_nobody_is_refused() -> None:
    forger = Forger()
    head = json.loads(kept_head(forger, 2))
    for change in ({"run": "0" * 32}, {"signature": "0" * 128}, {"forced": None}):
        with pytest.raises(RefusedError):
            verify_passport(SMALL, OWNER, heads=[canonical({**head, **change})])


def test_a_conviction_for_which_no_evidence_is_named_is_a_doubt(tmp_path: Path) -> None:
    """The owner could frame anybody by a line of its own."""
    forger = Forger()
    lines = forger.lines
    number = next(number for number, line in enumerate(lines) if line["kind"] == "verdict")
    framed = {**lines[number]["body"], "party": "worker-2", "evidence": None, "evidence_sha256": None}
    forger.write_log([*lines[: number + 1], {**lines[number], "body": framed}, *lines[number + 1 :]])
    names = ("party", "offence", "step", "evidence", "evidence_sha256")
    forger.facts["verdicts"].append({name: framed.get(name) for name in names})

    findings = verify_passport(forger.write_sealed(tmp_path / "framed"), OWNER)

    assert findings.rows["convicted"] == "worker-1, worker-2"
    assert "evidence that the log names is not here: none against worker-2" in findings.doubts


def test_evidence_in_a_form_that_is_not_read_is_a_doubt(tmp_path: Path) -> None:
    """It would pass for a proof against whomever the owner names."""
    forger = Forger()
    name = name_in(forger, "evidence/")
    put_evidence(forger, name, {"format": "another/1", "verdict": {}})

    findings = verify_passport(forger.write_sealed(tmp_path / "framed"), OWNER)

    assert findings.rows["evidence"] == "none"
    assert findings.doubts == [f"{name}: is not judged here, but by `phalanx audit explain`"]


def test_evidence_that_was_left_out_is_named(tmp_path: Path) -> None:
    forger = Forger()
    name = name_in(forger, "evidence/")
    del forger.members[name]

    found = verify_passport(forger.write_sealed(tmp_path / "less"), OWNER)

    assert found.doubts == [f"evidence that the log names is not here: {name}"]


def sign_model_anew(forger: Forger, home: Path) -> None:
    """Let every statement of a passport be about the files of a directory, signed by the owner."""
    files = ModelFiles.from_directory(home, "model")
    forger.members[SIGNATURE] = forger.signer.sign_model(files)
    name_model(forger, files.root)


def name_model(forger: Forger, root: str) -> None:
    forger.facts["model"]["root"] = root
    for name in (PROVENANCE, EVALUATION, "tests/redteam.dsse.json"):
        forger.change_statement(name, lambda s: s["subject"][0]["digest"].update(sha256=root))
    forger.change_json(BOM, lambda bom: bom["metadata"]["component"]["hashes"][0].update(content=root))


def test_a_model_with_other_weights_is_refused_though_the_owner_signs_it(tmp_path: Path) -> None:
    """The digest of tensors is compared with the one that the log signed at the run's end."""
    home = shutil.copytree(MODEL, tmp_path / "model")
    data = bytearray((home / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (home / "model.safetensors").write_bytes(data)
    forger = Forger()
    sign_model_anew(forger, home)
    path = forger.write_sealed(tmp_path / "forged")

    # without the model the statements agree with each other, and the remark says what was not compared
    assert any("no model was compared" in remark for remark in verify_passport(path, OWNER).remarks)
    assert digest_weights(home) != forger.facts["model"]["weights"]
    with pytest.raises(RefusedError, match="the tensors are not those of the run"):
        verify_passport(path, OWNER, model=home)


def call_other_weights_merged(tmp_path: Path) -> tuple[Forger, Path]:
    """A passport with other weights, of which the owner says that they are the run's with its adapter; the model."""
    home = shutil.copytree(MODEL, tmp_path / "model")
    data = bytearray((home / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (home / "model.safetensors").write_bytes(data)
    forger, weights = Forger(), digest_weights(home)
    sign_model_anew(forger, home)
    forger.facts["model"] |= {"weights": weights, "is_whole": False}
    for name in (EVALUATION, "tests/redteam.dsse.json"):
        forger.change_statement(
            name, lambda s: s["predicate"]["configuration"][0]["annotations"].update(weights=weights)
        )
    return forger, home


def test_a_model_of_a_run_without_adapter_is_never_called_a_part_of_it(tmp_path: Path) -> None:
    """That a merged adapter has the run's weights is the owner's word, so the owner calls other weights merged."""
    forger, home = call_other_weights_merged(tmp_path)

    with pytest.raises(RefusedError, match="has other weights than the run ended with"):
        verify_passport(forger.write_sealed(tmp_path / "forged"), OWNER, model=home)


def test_tensors_of_a_merged_model_are_never_said_to_be_signed_by_the_run(tmp_path: Path) -> None:
    forger, home = call_other_weights_merged(tmp_path)
    statement = payload_of(forger.members[PROVENANCE])
    run_file = statement["predicate"]["buildDefinition"]["externalParameters"]["run_file"]
    run_file["model"]["adapter"] = {"rank": 4}
    forger.change_statement(
        PROVENANCE, lambda s: s["predicate"]["buildDefinition"]["externalParameters"].update(run_file=run_file)
    )
    change_line("run_started", lambda body: body.update(config_digest=sha256(canonical(run_file))))(forger)

    findings = verify_passport(forger.write_sealed(tmp_path / "merged"), OWNER, model=home)

    assert findings.rows["model's files"] == "as signed; tensors have the digest that the owner states"
    assert any("is the owner's word" in remark and "merged" in remark for remark in findings.remarks)


def test_a_config_that_the_owner_has_changed_is_named_as_the_owners_word(tmp_path: Path) -> None:
    """With another config the same tensors are another model, and the log signs the tensors alone."""
    home = shutil.copytree(MODEL, tmp_path / "model")
    config = json.loads((home / "config.json").read_text())
    (home / "config.json").write_text(json.dumps(config | {"layer_norm_epsilon": 0.5}))
    forger = Forger()
    sign_model_anew(forger, home)

    findings = verify_passport(forger.write_sealed(tmp_path / "forged"), OWNER, model=home)

    assert "that the model's config and tokenizer are the run's is the owner's word" in findings.remarks


def hide_in_a_pickle(home: Path, weights: dict[str, Tensor]) -> None:
    torch.save(weights, home / "pytorch_model.bin")


def hide_below(home: Path, weights: dict[str, Tensor]) -> None:
    (home / "more").mkdir()
    save_file(weights, home / "more" / "model.safetensors", {"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, "more/model.safetensors")}
    (home / "model.safetensors.index.json").write_text(json.dumps(index))


def hide_in_a_folder_of_git(home: Path, weights: dict[str, Tensor]) -> None:
    (home / ".git").mkdir()
    save_file(weights, home / ".git" / "model.safetensors", {"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, ".git/model.safetensors")}
    (home / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("hide", [hide_in_a_pickle, hide_below, hide_in_a_folder_of_git])
def test_weights_that_a_program_loads_in_the_place_of_the_runs_are_refused(
    hide: Callable[[Path, dict[str, Tensor]], None], tmp_path: Path
) -> None:
    """The attacker is the owner: the run's tensors lie beside others, which transformers finds first."""
    home = shutil.copytree(MODEL, tmp_path / "model")
    weights = {name: torch.zeros_like(value) for name, value in load_file(home / "model.safetensors").items()}
    (home / "model.safetensors").rename(home / "shown.safetensors")
    hide(home, weights)
    forger = Forger()
    sign_model_anew(forger, home)
    path = forger.write_sealed(tmp_path / "forged")

    loaded = AutoModelForCausalLM.from_pretrained(home, local_files_only=True)
    assert not any(value.any() for value in loaded.state_dict().values())
    with pytest.raises(RefusedError, match=r"in the place of the tensors|names other files"):
        verify_passport(path, OWNER, model=home)


def test_weights_under_a_name_that_no_program_looks_for_are_refused(tmp_path: Path) -> None:
    home = shutil.copytree(MODEL, tmp_path / "model")
    (home / "model.safetensors").rename(home / "shown.safetensors")

    with pytest.raises(RefusedError, match="no program finds its tensors"):
        digest_weights(home)


def test_weights_in_several_files_are_those_that_their_index_names(tmp_path: Path) -> None:
    home = shutil.copytree(MODEL, tmp_path / "model")
    whole = digest_weights(home)
    weights = load_file(home / "model.safetensors")
    (home / "model.safetensors").unlink()
    parts = {"a.safetensors": sorted(weights)[::2], "b.safetensors": sorted(weights)[1::2]}
    for name, tensors in parts.items():
        save_file({tensor: weights[tensor] for tensor in tensors}, home / name)
    index = {"weight_map": {tensor: name for name, tensors in parts.items() for tensor in tensors}}
    path = home / "model.safetensors.index.json"
    path.write_text(json.dumps(index))
    assert digest_weights(home) == whole

    index["weight_map"][parts["a.safetensors"][0]] = "b.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(RefusedError, match="names other files"):
        digest_weights(home)


def test_a_signature_that_leaves_files_of_the_model_out_is_refused(tmp_path: Path) -> None:
    """Or whoever passes the model on exchanges the file that was left out."""
    home = shutil.copytree(MODEL, tmp_path / "model")
    forger = Forger()
    bundle = json.loads(forger.signer.sign_model(ModelFiles.from_directory(home, "model")))
    statement = payload_of(canonical(bundle["dsseEnvelope"]))
    statement["predicate"]["serialization"]["ignore_paths"] += ["generation_config.json"]
    (dropped,) = [row for row in statement["predicate"]["resources"] if row["name"] == "generation_config.json"]
    statement["predicate"]["resources"].remove(dropped)
    rest = b"".join(bytes.fromhex(row["digest"]) for row in statement["predicate"]["resources"])
    root = hashlib.sha256(rest).hexdigest()
    statement["subject"][0]["digest"]["sha256"] = root
    envelope = forger.signer.sign_statement(statement["subject"], statement["predicateType"], statement["predicate"])
    forger.members[SIGNATURE] = canonical({**bundle, "dsseEnvelope": json.loads(envelope)})
    name_model(forger, root)

    with pytest.raises(RefusedError, match="leaves files of the model unsigned"):
        verify_passport(forger.write_sealed(tmp_path / "forged"), OWNER, model=home)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_changed_file_of_the_model_is_refused(name: str, tmp_path: Path) -> None:
    home = shutil.copytree(MODEL, tmp_path / "model")
    (home / name).write_bytes((home / name).read_bytes() + b" ")

    with pytest.raises(RefusedError, match=name):
        verify_passport(SMALL, OWNER, model=home)


def flip_and_verify(path: Path, data: bytes, place: int, bit: int) -> bool:
    """Whether a flipped bit is refused."""
    with path.open("r+b") as file:
        file.seek(place)
        file.write(bytes([data[place] ^ (1 << bit)]))
    try:
        verify_passport(path)
    except RefusedError:
        return True
    finally:
        with path.open("r+b") as file:
            file.seek(place)
            file.write(data[place : place + 1])
    return False


def seal_place(data: bytes) -> int:
    """Where the seal begins, the only member that no digest covers."""
    return data.index(SEAL.encode())


def test_a_flipped_byte_is_refused_in_headers_the_seal_and_everywhere_else(tmp_path: Path) -> None:
    data = SMALL.read_bytes()
    path = tmp_path / "flipped"
    path.write_bytes(data)
    begin = seal_place(data)
    places = [*range(0, 512, 7), *range(begin, len(data), 97), *range(0, begin, 1999)]

    accepted = [place for place in places if not flip_and_verify(path, data, place, place % 8)]

    assert accepted == []


@pytest.mark.slow
def test_every_flipped_byte_of_a_small_passport_is_refused(tmp_path: Path) -> None:
    data = SMALL.read_bytes()
    path = tmp_path / "flipped"
    path.write_bytes(data)

    accepted = [place for place in range(len(data)) if not flip_and_verify(path, data, place, place % 8)]

    assert accepted == []


@pytest.mark.slow
def test_flipped_bytes_of_a_large_passport_are_refused(tmp_path: Path) -> None:
    """A passport with 16 MB of evidence: its record has an unread key; 10,000 places, evenly."""
    forger = Forger()
    name = name_in(forger, "evidence/")
    record = json.loads(forger.members[name])
    record["verdict"]["reason"] = "x" * 2_000_000
    put_evidence(forger, name, record)
    path = forger.write_sealed(tmp_path / "large")
    data = path.read_bytes()
    assert verify_passport(path, OWNER).doubts == []

    accepted = [
        place
        for number in range(10_000)
        if not flip_and_verify(path, data, place := number * len(data) // 10_000, number % 8)
    ]

    assert accepted == []


def test_members_are_hashed_in_the_order_of_the_bundle(tmp_path: Path) -> None:
    members = {"b/x": b"1", "a": b"2"}
    write_bundle(tmp_path / "one", members, b"{}")

    assert list(hash_members(members)) == ["a", "b/x"]
