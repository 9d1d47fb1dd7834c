"""``phalanx enclave``: one verdict, one reason, one exit code."""

import json
from pathlib import Path

import pytest

from phalanx.cli import run_command

VECTORS = Path(__file__).resolve().parents[1] / "vectors"
REPORT_DATA = "48656c6c6f2c20776f726c6421".ljust(128, "0")
POLICY = """
[expect]
report_data = "{report_data}"
[sgx]
measurements.mrenclave = ["{mrenclave}"]
accepted_tcb = ["ConfigurationAndSWHardeningNeeded"]
"""
AT = "2025-06-20T00:00:00Z"


@pytest.fixture
def envelope(tmp_path, capsys):
    """A published SGX quote, packed."""
    out = tmp_path / "evidence.json"
    collateral = VECTORS / "sgx" / "sgx_quote_collateral.json"
    quote = str(VECTORS / "sgx" / "sgx_quote")
    assert (
        run_command(["enclave", "pack", quote, "--kind", "sgx", "--add", f"collateral={collateral}", "--out", str(out)])
        == 0
    )
    assert "sgx evidence of 4600 bytes" in capsys.readouterr().out
    return out


@pytest.fixture
def mrenclave(envelope, capsys):
    """What measure reads out of it."""
    assert run_command(["enclave", "measure", str(envelope)]) == 0
    out = capsys.readouterr().out
    assert "not appraised" in out
    (line,) = [line for line in out.splitlines() if line.startswith('"mrenclave"')]
    return line.split('"')[3]


def write(folder, mrenclave, report_data=REPORT_DATA):
    path = folder / "policy.toml"
    path.write_text(POLICY.format(mrenclave=mrenclave, report_data=report_data))
    return str(path)


def test_packed_evidence_is_accepted(envelope, mrenclave, tmp_path, capsys):
    policy = write(tmp_path, mrenclave)

    code = run_command(["enclave", "appraise", str(envelope), "--policy", policy, "--at", AT, "--json"])

    result = json.loads(capsys.readouterr().out)
    assert code == 0
    assert result["accepted"] is True
    assert result["measurements"]["mrenclave"] == mrenclave
    assert result["tcb"]["status"] == "ConfigurationAndSWHardeningNeeded"
    assert run_command(["enclave", "appraise", str(envelope), "--policy", policy, "--at", AT]) == 0
    assert "accepted" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("at", "mrenclave_is", "report_data", "reason"),
    [
        ("2026-06-20T00:00:00Z", None, REPORT_DATA, "expired"),
        (AT, "00" * 32, REPORT_DATA, "wrong_measurement"),
        (AT, None, "00" * 64, "wrong_nonce"),
    ],
)
def test_a_refusal_has_one_reason_and_exit_code_5(
    envelope, mrenclave, tmp_path, capsys, at, mrenclave_is, report_data, reason
):
    policy = write(tmp_path, mrenclave_is or mrenclave, report_data)

    code = run_command(["enclave", "appraise", str(envelope), "--policy", policy, "--at", at, "--json"])

    captured = capsys.readouterr()
    assert code == 5
    assert json.loads(captured.out)["reason"] == reason
    assert captured.err.startswith(f"error: {reason}: ")


def test_a_file_that_is_no_envelope_is_refused(tmp_path, capsys):
    (tmp_path / "evidence.json").write_bytes(b"\x00\x01")
    policy = write(tmp_path, "00" * 32)

    assert run_command(["enclave", "appraise", str(tmp_path / "evidence.json"), "--policy", policy]) == 5
    assert "malformed" in capsys.readouterr().err


def test_what_the_user_got_wrong_has_its_own_exit_codes(envelope, tmp_path, capsys):
    policy = write(tmp_path, "00" * 32)
    bare = tmp_path / "bare.toml"
    bare.write_text("[sgx]\nmeasurements.mrenclave = ['00']\n")

    assert run_command(["enclave", "appraise", str(envelope), "--policy", str(bare)]) == 2
    assert "[expect] is missing" in capsys.readouterr().err
    assert run_command(["enclave", "appraise", str(envelope), "--policy", policy, "--at", "noon"]) == 2
    assert run_command(["enclave", "appraise", str(envelope), "--policy", policy, "--at", "2025-06-20T00:00:00"]) == 2
    assert run_command(["enclave", "appraise", str(tmp_path / "absent"), "--policy", policy]) == 3
    assert run_command(["enclave", "pack", str(envelope), "--kind", "cca", "--out", str(tmp_path / "x")]) == 2
    assert (
        run_command(["enclave", "pack", str(envelope), "--kind", "snp", "--add", "x", "--out", str(tmp_path / "x")])
        == 2
    )
    hexed = ["enclave", "pack", str(envelope), "--kind", "snp", "--encoding", "hex", "--out", str(tmp_path / "x")]
    assert run_command(hexed) == 3
