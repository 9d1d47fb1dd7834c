"""An export's statement is signed, names every file and its source, and what was changed afterwards is refused."""

import base64
import hashlib
import json
import shutil

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from phalanx.cli import run_command as command_line
from phalanx.config import canonical_json
from phalanx.edge import ExportOrigin, compare_run, compare_source, export_edge, verify_statement
from phalanx.edge.statement import STATEMENT_FILE
from phalanx.errors import CheckpointError, VerificationError
from phalanx.security.crypto import Identity
from tiny_edge_models import write_model

SIGNER = Identity.without_certificate("export-signer")
KEY = SIGNER.public.public_key.hex()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("edge") / "llama")


@pytest.fixture(scope="module")
def exported(model, tmp_path_factory):
    out = tmp_path_factory.mktemp("edge") / "out"
    export_edge(model, out, "gguf", "q8_0", sizes=None, origin=ExportOrigin(SIGNER, "run-1", 3, "ab" * 32))
    return out


@pytest.fixture
def copy(exported, tmp_path):
    return shutil.copytree(exported, tmp_path / "copy")


@pytest.mark.parametrize("name", [".gitattributes", "read me (1).txt", "_vocab.txt", "\u00fc.json"])
def test_a_model_directory_may_hold_files_of_any_name(model, tmp_path, name):
    source = shutil.copytree(model, tmp_path / "model")
    (source / name).write_text("*.safetensors filter=lfs")

    export_edge(source, tmp_path / "out", "gguf", "q8_0", sizes=None, origin=ExportOrigin(SIGNER))

    digest = hashlib.sha256(b"*.safetensors filter=lfs").hexdigest()
    assert verify_statement(tmp_path / "out", KEY).facts.source.files[name] == digest


def envelope_of(directory):
    return json.loads((directory / STATEMENT_FILE).read_bytes())


def statement_of(directory):
    return json.loads(base64.b64decode(envelope_of(directory)["payload"]))


def write_envelope(directory, statement, signer=SIGNER, **changed):
    payload = statement if isinstance(statement, bytes) else canonical_json(statement)
    head = b"DSSEv1 28 application/vnd.in-toto+json %d " % len(payload)
    signature = base64.b64encode(signer.sign_data(head + payload)).decode()
    whole = {
        "payload": base64.b64encode(payload).decode(),
        "payloadType": "application/vnd.in-toto+json",
        "signatures": [{"keyid": signer.public.public_key.hex(), "sig": signature}],
        **changed,
    }
    (directory / STATEMENT_FILE).write_text(json.dumps(whole))


def test_the_statement_holds_source_settings_and_digests_and_others_can_check_it(exported, model):
    envelope, statement = envelope_of(exported), statement_of(exported)

    # by the text of DSSE, without our code
    payload = base64.b64decode(envelope["payload"])
    signed = b"DSSEv1 28 application/vnd.in-toto+json " + str(len(payload)).encode() + b" " + payload
    Ed25519PublicKey.from_public_bytes(bytes.fromhex(KEY)).verify(
        base64.b64decode(envelope["signatures"][0]["sig"]), signed
    )
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    digests = {subject["name"]: subject["digest"]["sha256"] for subject in statement["subject"]}
    assert digests == {
        name: hashlib.sha256((exported / name).read_bytes()).hexdigest() for name in ("differences.json", "model.gguf")
    }
    facts = statement["predicate"]
    assert (facts["format"], facts["precision"], facts["quantiser"]["block"]) == ("gguf", "q8_0", 32)
    assert facts["source"]["files"]["config.json"] == hashlib.sha256((model / "config.json").read_bytes()).hexdigest()
    assert (facts["source"]["run"], facts["source"]["step"]) == ("run-1", 3)
    assert facts["state"] == "not checked by an independent runtime"
    assert facts["compared"] is None


def test_an_untouched_export_is_accepted_and_a_signer_that_nobody_named_is_said(exported):
    assert verify_statement(exported, KEY).is_expected
    assert not verify_statement(exported).is_expected


def change_byte(directory):
    content = bytearray((directory / "model.gguf").read_bytes())
    content[-1] ^= 1
    (directory / "model.gguf").write_bytes(bytes(content))


def claim_check(directory):
    table = json.loads((directory / "differences.json").read_text())
    (directory / "differences.json").write_text(json.dumps({**table, "state": "checked"}))


def link_file(directory):
    moved = directory.parent / "elsewhere.gguf"
    (directory / "model.gguf").rename(moved)
    (directory / "model.gguf").symlink_to(moved)


def edit_payload(directory):
    statement = statement_of(directory)
    statement["predicate"]["state"] = "checked"
    whole = envelope_of(directory) | {"payload": base64.b64encode(canonical_json(statement)).decode()}
    (directory / STATEMENT_FILE).write_text(json.dumps(whole))


CHANGES = {
    "a byte of the model": (change_byte, "model.gguf: was changed"),
    "a row of the table": (claim_check, "differences.json: was changed"),
    "a further file": (lambda path: (path / "adapter.gguf").write_bytes(b"x"), r"not in the statement: \['adapter"),
    "a further directory": (lambda path: (path / "more").mkdir(), r"not in the statement: \['more"),
    "a hidden file": (lambda path: (path / ".x").write_bytes(b"x"), "not in the statement"),
    "a file less": (lambda path: (path / "differences.json").unlink(), r"missing: \['differences.json"),
    "a link to the same bytes": (link_file, "no plain file"),
    "the statement's words": (edit_payload, "signature does not hold"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_changed_after_the_export_is_refused(copy, change):
    act, message = CHANGES[change]
    act(copy)

    # with and without a named signer: the key is as it was
    for signer in (KEY, None):
        with pytest.raises(VerificationError, match=message):
            verify_statement(copy, signer)


def test_another_key_is_refused_where_one_is_expected_and_named_otherwise(copy):
    stranger = Identity.without_certificate("stranger")
    change_byte(copy)
    statement = statement_of(copy)
    for subject in statement["subject"]:
        subject["digest"]["sha256"] = hashlib.sha256((copy / subject["name"]).read_bytes()).hexdigest()
    write_envelope(copy, statement, stranger)

    with pytest.raises(VerificationError, match="expected"):
        verify_statement(copy, KEY)
    assert verify_statement(copy).signer == stranger.public.public_key.hex()
    write_envelope(copy, statement, stranger, signatures=[{**envelope_of(copy)["signatures"][0], "keyid": KEY}])
    with pytest.raises(VerificationError, match="signature does not hold"):
        verify_statement(copy, KEY)


def with_name(statement, name):
    statement["subject"][0]["name"] = name
    return statement


MALFORMED = {
    "no JSON": lambda path, _: (path / STATEMENT_FILE).write_bytes(b"\xff{"),
    "a list": lambda path, _: (path / STATEMENT_FILE).write_bytes(b"[]"),
    "empty": lambda path, _: (path / STATEMENT_FILE).write_bytes(b""),
    "too long": lambda path, _: (path / STATEMENT_FILE).write_bytes(b" " * (2**20 + 1)),
    "deep": lambda path, _: (path / STATEMENT_FILE).write_bytes(b"[" * 100_000),
    "a key twice": lambda path, _: (path / STATEMENT_FILE).write_bytes(
        b'{"payload":"",' + (path / STATEMENT_FILE).read_bytes()[1:]
    ),
    "no signature": lambda path, statement: write_envelope(path, statement, signatures=[]),
    "two signatures": lambda path, statement: write_envelope(
        path, statement, signatures=envelope_of(path)["signatures"] * 2
    ),
    "another type": lambda path, statement: write_envelope(path, statement, payloadType="text/plain"),
    "no base64": lambda path, statement: write_envelope(path, statement, payload="é*"),
    "a further field": lambda path, statement: write_envelope(path, {**statement, "more": 1}),
    "another predicate": lambda path, statement: write_envelope(path, {**statement, "predicateType": "urn:x"}),
    "blanks in what is signed": lambda path, statement: write_envelope(path, json.dumps(statement).encode()),
    "a file outside": lambda path, statement: write_envelope(path, with_name(statement, "../config.json")),
    "a file twice": lambda path, statement: write_envelope(
        path, {**statement, "subject": [*statement["subject"], statement["subject"][0]]}
    ),
    "no file": lambda path, statement: write_envelope(path, {**statement, "subject": []}),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_malformed_statement_is_refused_though_its_signer_is_right(copy, kind):
    MALFORMED[kind](copy, statement_of(copy))

    with pytest.raises(VerificationError):
        verify_statement(copy, KEY)


def test_without_a_statement_there_is_nothing_to_verify(copy):
    (copy / STATEMENT_FILE).unlink()

    with pytest.raises(CheckpointError, match="export the model again"):
        verify_statement(copy, KEY)


def test_the_source_is_compared_by_weights_and_by_checkpoint(exported, model, tmp_path):
    verified = verify_statement(exported, KEY)
    other = write_model(tmp_path / "other", num_hidden_layers=1)
    checkpoint = tmp_path / "step-00000003"
    checkpoint.mkdir()
    (checkpoint / "manifest.json").write_bytes(b"{}")

    compare_source(verified, model)
    with pytest.raises(VerificationError, match="was made from"):
        compare_source(verified, other)
    for name in ("config.json", "tokenizer.json", "chat_template.jinja"):
        swapped = shutil.copytree(model, tmp_path / f"swapped-{name}")
        (swapped / name).write_bytes((model / name).read_bytes() + b"\n" if (model / name).exists() else b"obey me")
        with pytest.raises(VerificationError, match=f"{name}: found SHA-256"):
            compare_source(verified, swapped)
    for run, message in (("run-2", "made from run run-1"), ("run-1", "manifest has")):
        with pytest.raises(VerificationError, match=message):
            compare_run(verified, run, lambda step: checkpoint)


def test_commands_export_and_verify(model, tmp_path, capsys):
    out, key = tmp_path / "out", tmp_path / "keys" / "export.key"
    key.parent.mkdir(mode=0o700)
    arguments = ["--format", "gguf", "--texts", "50", "--num-prompts", "2", "--signing-key", str(key), "--json"]
    assert command_line(["export", str(model), str(out), *arguments]) == 0
    signer = json.loads(capsys.readouterr().out)["signer"]

    assert command_line(["model", "verify", str(out), str(model), "--signer", signer, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["trust"] == "the expected key"
    assert facts["comparison"] == "checked"
    assert command_line(["model", "verify", str(out), "--signer", KEY]) == 5
    change_byte(out)
    assert command_line(["model", "verify", str(out)]) == 5
    assert "was changed" in capsys.readouterr().err


def test_an_export_that_was_never_compared_is_not_called_good(exported, capsys):
    for words in (["model", "verify"], ["verify"]):
        assert command_line([*words, str(exported), "--signer", KEY]) == 7
        assert "not checked" in capsys.readouterr().out


def test_a_directory_without_statement_needs_a_run_or_is_refused(model, capsys):
    assert command_line(["model", "verify", str(model)]) == 2
    assert command_line(["model", "verify", str(model), "--signer", KEY]) == 3
    assert "statement" in capsys.readouterr().err
