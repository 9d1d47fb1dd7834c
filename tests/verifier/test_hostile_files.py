"""What a stranger is handed is the work of who hands it over: every answer to it is one of four exit codes."""

import base64
import json
import os
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from phalanx.verifier.__main__ import main
from phalanx.verifier.forms import RefusedError, UnreadableError, canonical
from phalanx.verifier.kinds import Expectations, verify_path
from phalanx.verifier.statement import EXPORT_PREDICATE, PAYLOAD_TYPE, STATEMENT_TYPE, signed_bytes


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_bytes(b"")
    os.mkfifo(tmp_path / "owner.pem")

    with pytest.raises(UnreadableError, match="is no file"):
        verify_path(tmp_path, Expectations())


def sign_export(home: Path, predicate: object) -> None:
    (home / "model.gguf").write_bytes(b"")
    subject = [
        {"name": "model.gguf", "digest": {"sha256": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"}}
    ]
    statement = {"_type": STATEMENT_TYPE, "subject": subject, "predicateType": EXPORT_PREDICATE, "predicate": predicate}
    key, payload = Ed25519PrivateKey.generate(), canonical(statement)
    envelope = {
        "payload": base64.b64encode(payload).decode(),
        "payloadType": PAYLOAD_TYPE,
        "signatures": [
            {
                "keyid": key.public_key().public_bytes_raw().hex(),
                "sig": base64.b64encode(key.sign(signed_bytes(payload))).decode(),
            }
        ],
    }
    (home / "statement.dsse.json").write_text(json.dumps(envelope))


@pytest.mark.parametrize(
    "predicate", [{"format": "gguf"}, {"format": "gguf", "precision": "f32", "state": 1, "source": []}]
)
def test_a_signed_statement_without_its_facts_is_refused_and_no_trace_is_shown(
    predicate: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sign_export(tmp_path, predicate)

    with pytest.raises(RefusedError):
        verify_path(tmp_path, Expectations())
    assert main([str(tmp_path)]) == 5
    assert "refused" in capsys.readouterr().out
