"""Statements of a passport in the formats of others, and the commands that make and check one."""

import base64
import json
import os
import shutil
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from phalanx.cli.outcome import run_command
from phalanx.evaluate.evaluation import EvaluationResult, FigureRecord, SuiteResult, result_text
from phalanx.verifier.bundle import read_bundle

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "verifier"))
from forger import MODEL, SMALL, Forger, payload_of

OWNER = Forger().owner.public.public_key.hex()
MODEL_SIGNING = os.environ.get("PHALANX_MODEL_SIGNING", "")
"""The program `model_signing` of an environment of its own: its packages are none of ours."""


def test_the_bill_of_materials_fits_the_published_schema() -> None:
    pytest.importorskip("jsonschema", reason="jsonschema, which the validator of CycloneDX needs, is not installed")
    text = Forger().members["bom.cdx.json"].decode()

    assert JsonStrictValidator(SchemaVersion.V1_7).validate_str(text) is None
    bill = json.loads(text)
    shares = {
        part["name"]: {note["name"]: note["value"] for note in part["properties"]}["phalanx:share"]
        for part in bill["components"]
        if part["bom-ref"].startswith("source:")
    }
    assert sum(map(float, shares.values())) == pytest.approx(1.0, abs=1e-5)
    assert {"free", "bought"} == set(shares)


@pytest.mark.parametrize("name", ["provenance.dsse.json", "tests/evaluation.dsse.json", "tests/redteam.dsse.json"])
def test_statements_have_the_form_of_in_toto(name: str) -> None:
    statement = payload_of(Forger().members[name])

    assert set(statement) == {"_type", "subject", "predicateType", "predicate"}
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert all(set(subject) == {"name", "digest"} for subject in statement["subject"])
    predicate = statement["predicate"]
    if name == "provenance.dsse.json":
        assert {"buildType", "externalParameters", "internalParameters", "resolvedDependencies"} == set(
            predicate["buildDefinition"]
        )
        assert {"builder", "metadata"} == set(predicate["runDetails"])
    else:
        assert {"result", "configuration", "passedTests", "warnedTests", "failedTests"} == set(predicate)
        assert predicate["result"] in ("PASSED", "WARNED", "FAILED")


def test_equal_statements_have_equal_signatures() -> None:
    forger = Forger()
    before = forger.members["provenance.dsse.json"]

    forger.change_statement("provenance.dsse.json", lambda statement: None)

    assert forger.members["provenance.dsse.json"] == before


@pytest.mark.skipif(not MODEL_SIGNING, reason="needs PHALANX_MODEL_SIGNING")
def test_the_reference_verifier_accepts_the_model_signature(tmp_path: Path) -> None:
    forger = Forger()
    (tmp_path / "model.sig").write_bytes(forger.members["model/model.sig"])
    (tmp_path / "owner.pub").write_bytes(forger.signer.public_pem)
    options = ["--signature", tmp_path / "model.sig", "--public_key", tmp_path / "owner.pub"]

    done = subprocess.run([MODEL_SIGNING, "verify", "key", MODEL, *options], capture_output=True, check=False)

    assert done.returncode == 0, done.stderr


IN_TOTO = """
import base64, json, sys
from google.protobuf import json_format
from in_toto_attestation.predicates.provenance.v1 import provenance_pb2
from in_toto_attestation.predicates.test_result.v0 import test_result_pb2
from in_toto_attestation.v1 import statement_pb2
from in_toto_attestation.v1.statement import Statement

kinds = {
    "https://slsa.dev/provenance/v1": provenance_pb2.Provenance,
    "https://in-toto.io/attestation/test-result/v0.1": test_result_pb2.TestResult,
}
for envelope in sys.stdin:
    payload = json.loads(base64.b64decode(json.loads(envelope)["payload"]))
    Statement.copy_from_pb(json_format.ParseDict(payload, statement_pb2.Statement())).validate()
    json_format.ParseDict(payload["predicate"], kinds[payload["predicateType"]]())
"""


@pytest.mark.skipif(not MODEL_SIGNING, reason="needs PHALANX_MODEL_SIGNING")
@pytest.mark.parametrize("old", [b"", b"predicateType"])
def test_in_totos_own_schemas_fit_every_statement(old: bytes) -> None:
    """Its package comes with the reference verifier; a key that the schema does not know is refused."""
    members = Forger().members
    names = ("provenance.dsse.json", "tests/evaluation.dsse.json", "tests/redteam.dsse.json")
    envelopes = [json.loads(members[name]) for name in names]
    payloads = [base64.b64decode(envelope["payload"]).replace(old, b"x" + old, bool(old)) for envelope in envelopes]
    rows = [json.dumps({"payload": base64.b64encode(payload).decode()}) for payload in payloads]

    python = Path(MODEL_SIGNING).with_name("python")
    done = subprocess.run([python, "-c", IN_TOTO], input="\n".join(rows).encode(), capture_output=True, check=False)

    assert done.returncode == bool(old), done.stderr


def test_verify_answers_with_rows_and_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    forger = Forger()
    forger.facts["audits"]["proven"] = 600
    forged = forger.write_sealed(tmp_path / "forged")

    assert run_command(["verify", str(SMALL), "--owner", OWNER, "--model", str(MODEL)]) == 0
    assert "passport of a run: holds" in capsys.readouterr().out
    assert run_command(["verify", str(SMALL), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["kind"], answer["doubts"], answer["owner"]) == ("passport of a run", [], OWNER)
    assert run_command(["verify", str(forged)]) == 5
    assert "the seal says audits" in capsys.readouterr().err
    assert run_command(["verify", str(tmp_path / "nothing")]) == 3
    assert run_command(["verify", str(SMALL), "--owner", "0" * 64]) == 5


def test_a_passport_of_something_else_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    assert run_command(["passport", str(tmp_path), "--out", str(tmp_path / "out.passport")]) == 3
    assert not (tmp_path / "out.passport").exists()


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
def test_a_run_that_made_its_own_corpus_has_a_passport(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], packing: str
) -> None:
    from phalanx.train import load_run, train
    from tiny_run_file import tiny_run_file

    monkeypatch.setenv("PHALANX_CACHE", str(tmp_path / "cache"))
    text = tiny_run_file("[parallel]\ndp = 1\n", steps=2).replace("[data]", f'[data]\npacking = "{packing}"', 1)
    (tmp_path / "run.toml").write_text(text)
    train(load_run(tmp_path / "run.toml"), tmp_path / "run")

    assert run_command(["passport", str(tmp_path / "run"), "--out", str(tmp_path / "one.passport")]) in (0, 7)
    capsys.readouterr()
    assert run_command(["verify", str(tmp_path / "one.passport"), "--json"]) == 7
    assert any("their signer's word" in doubt for doubt in json.loads(capsys.readouterr().out)["doubts"])


@pytest.mark.slow
def test_a_passport_is_made_of_a_real_run_and_never_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from test_erasure import TEXTS, write_dataset, write_run_file

    from phalanx.train import load_run, train

    monkeypatch.setenv("PHALANX_CACHE", str(tmp_path / "cache"))
    home = write_dataset(tmp_path / "data", TEXTS)
    train(load_run(write_run_file(tmp_path / "run.toml", home, "best_fit", 4, 2)), tmp_path / "run")
    words = ["passport", str(tmp_path / "run"), "--out", str(tmp_path / "one.passport"), "--document", "hoplite/7.0"]
    figure = FigureRecord(metric="accuracy", value=0.5, low=None, high=None, n=1, clusters=1, method="none")
    suite = SuiteResult(name="own", kind="choice", version=1, suite_digest="0" * 64, num_rows=1, figures=(figure,))
    evaluation = EvaluationResult(subject="a server", model={}, seed=0, versions={}, suites=(suite,))
    result = tmp_path / "run" / "evaluation.json"
    result.write_text(result_text(evaluation))

    # the pipeline has no worker: its audits prove steps nevertheless
    assert run_command(words) in (0, 7)
    assert run_command(words) == 2
    capsys.readouterr()
    # whoever changes a figure afterwards has another file than the one that the passport names
    member = read_bundle(tmp_path / "one.passport")["tests/evaluation.dsse.json"].read_all(2**20)
    (stated,) = payload_of(member)["predicate"]["configuration"]
    assert stated["annotations"]["figures"] == {"own.accuracy": "0.5"}
    assert stated["digest"]["sha256"] == sha256(result.read_bytes()).hexdigest()
    assert run_command(["checkpoint", "export", str(tmp_path / "run"), str(tmp_path / "model")]) == 0
    assert run_command(["verify", str(tmp_path / "one.passport"), "--model", str(tmp_path / "model")]) in (0, 7)
    shutil.copytree(tmp_path / "model", tmp_path / "other")
    (tmp_path / "other" / "config.json").write_text("{}")
    assert run_command(["verify", str(tmp_path / "one.passport"), "--model", str(tmp_path / "other")]) == 5
