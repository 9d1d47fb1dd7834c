"""``phalanx enclave attest``: evidence of this machine, bound to what was asked, with its tier in plain words."""

import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from phalanx.cli import run_command
from phalanx.security.tee import parse_evidence, tls_key_digest

sys.path.append(str(Path(__file__).resolve().parents[1] / "security" / "tee"))

NONCE, RUN, KEY = "0a" * 32, "0c" * 32, "0b" * 32


def asked(out: Path, *more: str, nonce: str = NONCE, key: str = KEY) -> list[str]:
    return ["enclave", "attest", "--nonce", nonce, "--key", key, "--run", RUN, "--out", str(out), *more]


def test_evidence_of_a_tpm_is_written_and_its_tier_said(tpm, tmp_path, capsys):
    key = ec.generate_private_key(ec.SECP256R1()).public_key()
    (tmp_path / "key.pem").write_bytes(key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    out = tmp_path / "evidence.json"

    code = run_command(
        asked(out, "--kind", "tpm", "--tpm", tpm.address, "--pcrs", "0,16", key=str(tmp_path / "key.pem"))
    )

    said = capsys.readouterr().out
    evidence = parse_evidence(out.read_bytes())
    assert code == 0
    assert "keeps no memory secret" in said
    assert "sha256.16" in said
    assert evidence.statement.tls_key == tls_key_digest(key)
    assert evidence.statement.nonce.hex() == NONCE


def test_what_was_attested_is_appraised(tpm, tmp_path, capsys):
    out, policy = tmp_path / "evidence.json", tmp_path / "policy.toml"
    assert run_command(asked(out, "--kind", "tpm", "--tpm", tpm.address, "--pcrs", "0,16")) == 0
    assert run_command(["enclave", "measure", str(out)]) == 0
    measured = [line for line in capsys.readouterr().out.splitlines() if line.startswith('"sha256')]
    from phalanx.security.tee.tpm.structures import parse_public

    name = parse_public(parse_evidence(out.read_bytes()).endorsements["ak"]).name.hex()
    policy.write_text(
        f'[expect]\nnonce = "{NONCE}"\ntls_key = "{KEY}"\nrun = "{RUN}"\n'
        f'[tpm]\nak_names = ["{name}"]\n[tpm.measurements]\n' + "\n".join(measured)
    )

    assert run_command(["enclave", "appraise", str(out), "--policy", str(policy)]) == 0
    policy.write_text(policy.read_text().replace(NONCE, "0d" * 32))
    assert run_command(["enclave", "appraise", str(out), "--policy", str(policy)]) == 5


def test_a_machine_that_gives_no_evidence_says_so(tmp_path, capsys):
    out = tmp_path / "evidence.json"

    assert run_command(asked(out, "--kind", "nitro")) == 3
    assert "Nitro enclave" in capsys.readouterr().err
    assert run_command(asked(out, "--kind", "tpm", "--tpm", f"swtpm:path={tmp_path / 'absent'}")) == 5
    assert not out.exists()


@pytest.mark.parametrize(
    "changes",
    [{"nonce": "0a"}, {"nonce": "0A" * 32}, {"nonce": "zz" * 32}],
)
def test_a_nonce_that_is_none_is_refused(tmp_path, changes):
    assert run_command(asked(tmp_path / "out", **changes)) == 2


def test_a_wrong_command_line_is_refused(tmp_path):
    (tmp_path / "key.pem").write_text("no key")

    assert run_command(asked(tmp_path / "out", key=str(tmp_path / "key.pem"))) == 2
    assert run_command(asked(tmp_path / "out", key=str(tmp_path / "absent.pem"))) == 3
    assert run_command(asked(tmp_path / "out", "--pcrs", "0;7", "--kind", "tpm")) == 2
    assert run_command(asked(tmp_path / "out", "--role", "Not A Role")) == 2
    assert run_command(asked(tmp_path / "out", "--kind", "sim")) == 3


def test_a_certificate_is_as_good_as_its_key(tmp_path):
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import NameOID

    from phalanx.security.tee import read_tls_key_digest

    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "enclave")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now)
        .not_valid_after(now + timedelta(days=1))
        .sign(key, hashes.SHA256())
    )

    assert read_tls_key_digest(certificate.public_bytes(Encoding.PEM)) == tls_key_digest(key.public_key())
