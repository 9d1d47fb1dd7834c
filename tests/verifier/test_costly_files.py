"""Files that cost whoever checks them more than their size, or say another thing than was checked."""

import base64
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from forger import MODEL, SMALL, Forger

from phalanx.cli.outcome import run_command
from phalanx.errors import AuditLogError
from phalanx.security.crypto import create_authority, issue_certificate, load_identity
from phalanx.train.records.proof import verify_run
from phalanx.verifier.__main__ import main
from phalanx.verifier.forms import RefusedError, canonical, in_domain
from phalanx.verifier.kinds import Expectations, verify_path
from phalanx.verifier.log import verify
from phalanx.verifier.passport import list_draws, verify_passport
from phalanx.verifier.statement import ATTESTATION_PREDICATE, PAYLOAD_TYPE, STATEMENT_TYPE, digest_weights, signed_bytes

OWNER = Forger().owner.public.public_key.hex()


def verdict_of(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return json.loads(capsys.readouterr().out)


def write_run(home: Path, forger: Forger) -> Path:
    """A run's directory, of which the owner has written the log."""
    home.mkdir()
    names = {
        "log/events.jsonl": "events.jsonl",
        "log/steps.jsonl": "steps.jsonl",
        "certificates/owner.pem": "owner.pem",
    }
    for member, name in names.items():
        (home / name).write_bytes(forger.members[member])
    return home


# --- what an owner signs may not be work without end ---------------------------------------------------------


def change_opening(change: Callable[[dict[str, Any]], object]) -> Callable[[Forger], None]:
    def forge(forger: Forger) -> None:
        lines = forger.lines
        change(next(line["body"] for line in lines if line["kind"] == "run_started"))
        forger.write_log(lines)

    return forge


def one_batch_of_leaves_for_all(forger: Forger) -> None:
    """Each step is undone and done again with the leaves that were read before."""
    lines = forger.lines
    number, step = next((n, line) for n, line in enumerate(lines) if line["kind"] == "step")
    again = {**step, "kind": "rolled_back", "body": {"to": step["body"]["step"]}}
    forger.write_log([*lines[: number + 1], again, step])
    # write_log gives every step leaves of its own
    rows = [json.loads(row) for row in forger.members["log/events.jsonl"].splitlines()]
    rows[-1]["body"] = rows[number]["body"]
    unsigned = {key: value for key, value in rows[-1].items() if key != "signature"}
    rows[-1]["signature"] = forger.owner.sign_data(in_domain("log/1", canonical(unsigned))).hex()
    forger.members["log/events.jsonl"] = b"".join(canonical(row) + b"\n" for row in rows)


@pytest.mark.parametrize(
    ("forge", "message"),
    [
        (change_opening(lambda body: body.update(microbatches=10**15)), "its number of microbatches"),
        (change_opening(lambda body: body["guard"].update(audit_rate=1e15)), "its rate of audits"),
        (change_opening(lambda body: body["guard"].update(audit_rate="x")), "its rate of audits"),
        (change_opening(lambda body: body["guard"].update(shadow="none")), "the guard of another version"),
        (one_batch_of_leaves_for_all, "its leaves are those of an earlier step"),
    ],
    ids=["microbatches", "rate", "a word for a rate", "shadow", "leaves"],
)
def test_a_log_that_asks_for_work_without_end_is_refused(
    forge: Callable[[Forger], None], message: str, tmp_path: Path
) -> None:
    """Lists of 10^15 numbers were made, and a batch of 64 MiB was read for each line that named it."""
    forger = Forger()
    forge(forger)

    with pytest.raises(RefusedError, match=message):
        verify_path(write_run(tmp_path / "run", forger), Expectations(owner=OWNER))


@pytest.mark.parametrize(
    "forge",
    [
        change_opening(lambda body: body.update(microbatches=10**15)),
        change_opening(lambda body: body.update(microbatches=4.0)),
        lambda forger: forger.write_log(
            [
                {**line, "body": {key: value for key, value in line["body"].items() if key != "epoch"}}
                for line in forger.lines
            ]
        ),
    ],
    ids=["many microbatches", "a fraction of microbatches", "no epoch"],
)
def test_the_command_of_the_owners_own_program_refuses_such_logs_too(
    forge: Callable[[Forger], None], tmp_path: Path
) -> None:
    """`phalanx audit verify` ended with a traceback, or took all memory."""
    forger = Forger()
    forge(forger)

    with pytest.raises(AuditLogError):
        verify_run(write_run(tmp_path / "run", forger))


def without_guard(opening: dict[str, Any]) -> None:
    for key in ("audit_key_commitment", "audit_nonce", "guard", "leaves_format", "certificates"):
        del opening[key]


@pytest.mark.parametrize(
    ("change", "doubt"),
    [(without_guard, "guard"), (lambda opening: opening.update(leaves_format=2), "verdicts only")],
    ids=["no guard", "no records"],
)
def test_a_session_that_nobody_audited_behind_one_that_was_is_missing(
    change: Callable[[dict[str, Any]], None], doubt: str, tmp_path: Path
) -> None:
    """The attacker is the owner: it trains on without a guard, and ends the run with those weights."""
    forger = Forger()
    lines = forger.lines
    opening = next(line for line in lines if line["kind"] == "run_started")
    end = next(number for number, line in enumerate(lines) if line["kind"] == "run_completed")
    resumed = json.loads(json.dumps({**opening, "kind": "run_resumed"}))
    resumed["body"]["step"] = opening["body"]["steps"]
    change(resumed["body"])
    forger.write_log([*lines[:end], resumed, *lines[end:]])
    run = write_run(tmp_path / "run", forger)
    forger.facts["draws"] = list_draws(verify(run, (run / "owner.pem").read_text()))

    assert any(doubt in text for text in verify_path(run, Expectations(owner=OWNER)).doubts)
    assert any(doubt in text for text in verify_run(run).unproven)
    assert any(doubt in text for text in verify_passport(forger.write_sealed(tmp_path / "a.passport"), OWNER).doubts)


def test_records_in_a_format_that_nobody_knows_are_missing(tmp_path: Path) -> None:
    forger = Forger()
    change_opening(lambda body: body.update(leaves_format=2))(forger)

    assert any("verdicts only" in text for text in verify_run(write_run(tmp_path / "run", forger)).unproven)


def test_a_guard_that_was_off_is_missing_whatever_else_the_session_says(tmp_path: Path) -> None:
    forger = Forger()
    change_opening(lambda body: body["guard"].update(mode="off"))(forger)

    report = verify_path(write_run(tmp_path / "run", forger), Expectations(owner=OWNER))

    assert any("the guard was off" in doubt for doubt in report.doubts)


def test_a_text_in_the_place_of_a_step_is_no_format(tmp_path: Path) -> None:
    """`%` wrote a text of 10^12 characters."""
    forger = Forger()
    lines = forger.lines
    opening = next(line for line in lines if line["kind"] == "run_started")
    opening["body"]["steps_a_round"] = 1
    begun = {**opening, "kind": "round_begun", "body": {"step": "%1000000000000d"}}
    forger.write_log([*lines[: lines.index(opening) + 1], begun])

    with pytest.raises(RefusedError, match="'round_begun' is malformed"):
        verify_path(write_run(tmp_path / "run", forger), Expectations(owner=OWNER))


def test_tensors_that_share_their_bytes_are_no_safetensors(tmp_path: Path) -> None:
    """A header of a hundred megabytes can name a million, and each was read whole."""
    facts = {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}
    header = canonical({"a": facts, "b": facts})
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 8)

    with pytest.raises(RefusedError, match="no safetensors file"):
        digest_weights(tmp_path)


# --- what is said is what was checked ------------------------------------------------------------------------


def attest(path: Path, predicate: dict[str, Any]) -> str:
    """An attestation by somebody; returns the key."""
    key = Ed25519PrivateKey.generate()
    subject = [{"name": "publication", "digest": {"sha256": "ab" * 32}}]
    kind = {"_type": STATEMENT_TYPE, "subject": subject, "predicateType": ATTESTATION_PREDICATE}
    payload = json.dumps({**kind, "predicate": predicate}).encode()
    key_id, signature = key.public_key().public_bytes_raw().hex(), base64.b64encode(key.sign(signed_bytes(payload)))
    signatures = [{"keyid": key_id, "sig": signature.decode()}]
    envelope = {"payload": base64.b64encode(payload).decode(), "payloadType": PAYLOAD_TYPE, "signatures": signatures}
    path.write_text(json.dumps(envelope))
    return key_id


def test_a_statement_cannot_say_that_another_key_signed_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "attestation.json"
    key = attest(path, {"verdict": "proved", "signer": OWNER, "publication": "cd" * 32})

    assert main([str(path), "--json"]) == 0
    facts = verdict_of(capsys)["facts"]
    assert (facts["signer"], facts["publication"]) == (key, "ab" * 32)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e999", "[" * 5000 + "]" * 5000])
def test_facts_that_are_no_json_for_others_are_refused(
    value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "attestation.json"
    plain = json.dumps
    monkeypatch.setattr("json.dumps", lambda *given, **options: plain(*given, **options).replace('"@"', value))
    attest(path, {"verdict": "proved", "more": "@"})
    monkeypatch.undo()

    assert main([str(path), "--json"]) == 5
    assert verdict_of(capsys)["verdict"] == "refused"


def test_another_thing_than_was_expected_does_not_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Somebody puts what he signed himself in the place of a signed model; the reader's certificate was not used."""
    path = tmp_path / "attestation.json"
    attest(path, {"verdict": "proved"})
    certificate = tmp_path / "owner.pem"
    certificate.write_bytes(Forger().members["certificates/owner.pem"])

    assert main([str(path)]) == 0
    assert main([str(path), "--certificate", str(certificate)]) == 7
    assert "nothing that you expect (certificate) is compared with a attestation" in capsys.readouterr().out


def test_a_directory_is_not_checked_as_another_thing_than_it_may_be(tmp_path: Path) -> None:
    """A log that holds, beside a model that was changed, had the model's directory hold."""
    home = write_run(tmp_path / "run", Forger())
    assert verify_path(home, Expectations(owner=OWNER)).kind == "log of a run"
    (home / "model.sig").write_bytes(b"{}")

    with pytest.raises(RefusedError, match="is several things at once"):
        verify_path(home, Expectations(owner=OWNER))


def test_a_pipe_in_the_place_of_a_summary_is_not_waited_for(tmp_path: Path) -> None:
    home = write_run(tmp_path / "run", Forger())
    os.mkfifo(home / "summary.json")

    assert verify_path(home, Expectations(owner=OWNER)).kind == "log of a run"


def contradiction(home: Path, offence: str) -> Path:
    """Evidence of a party that told two others two tensors."""
    create_authority(home / "pki")
    identity = load_identity(issue_certificate(home / "pki", "worker-1"))

    def say(digest: str) -> dict[str, str]:
        body = {"epoch": 0, "step": 1, "microbatch": 0, "direction": "forward", "source": 0}
        names = {"run": "run-1", "kind": "tensor", "sender": "worker-1", "receiver": "worker-2"}
        header = canonical({**names, "body": body, "payload_digest": digest})
        return {"header": header.decode(), "signature": identity.sign_data(in_domain("frame/1", header)).hex()}

    record = {
        "format": 3,
        "session": "run-1",
        "verdict": {"party": "worker-1", "offence": offence},
        "authority": identity.authority_pem.decode(),
        "certificates": {"worker-1": identity.certificate_pem.decode()},
        "headers": {"told_stage": say("0" * 64), "told_auditor": say("1" * 64)},
        "tensors": {"file": "none.safetensors", "sha256": "0" * 64},
    }
    path = home / "evidence.json"
    path.write_bytes(canonical(record))
    return path


@pytest.mark.parametrize(("offence", "code"), [("equivocation", 0), ("output", 7), ("theft", 7)])
def test_two_headers_prove_two_words_and_no_other_offence(offence: str, code: int, tmp_path: Path) -> None:
    """Nobody signs the name of the offence."""
    assert main([str(contradiction(tmp_path, offence))]) == code


def test_an_honest_passport_is_compared_with_all_that_is_expected() -> None:
    assert main([str(SMALL), "--owner", OWNER, "--model", str(MODEL)]) == 0


def test_a_run_in_the_place_of_its_passport_leaves_the_model_uncompared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The attacker hands over the owner's run directory beside a model of his own."""
    run, expected = str(write_run(tmp_path / "run", Forger())), ["--owner", OWNER, "--model", str(tmp_path)]

    assert main([run, "--owner", OWNER]) == 0
    assert main([run, *expected]) == run_command(["verify", run, *expected]) == 7
    assert capsys.readouterr().out.count("nothing that you expect (model) is compared with a log of a run") == 2
    # another path of the same command is compared with it
    assert main([run, str(SMALL), "--owner", OWNER, "--model", str(MODEL)]) == 0
