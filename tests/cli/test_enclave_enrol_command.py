"""``phalanx enclave enrol``: a policy that accepts this TPM in this state, and names the authority behind it."""

import json
import sys
import tomllib
from pathlib import Path

import pytest

from phalanx.cli import run_command
from phalanx.errors import RefusedEvidenceError
from phalanx.security.crypto import steady_now
from phalanx.security.tee import (
    Binding,
    PolicyConfig,
    TpmAttester,
    appraise_evidence,
    build_policy,
    load_policy,
    open_tpm,
)

sys.path.append(str(Path(__file__).resolve().parents[1] / "security" / "tee"))
from bare_tpm import BareTpm
from swtpm_lab import SoftwareTpm, missing

BINDING = Binding(b"\1" * 32, b"\2" * 32, b"\3" * 32, "enclave")


def appraised(address, policy):
    with open_tpm(address) as device, TpmAttester(device) as attester:
        evidence = attester.make_evidence(BINDING)
    return appraise_evidence(evidence, load_policy(policy)[0], BINDING, steady_now())


def test_what_was_enrolled_is_accepted_and_said_to_be_unvouched(tpm, tmp_path, capsys):
    out = tmp_path / "policy.toml"

    code = run_command(["enclave", "enrol", "--tpm", tpm.address, "--unsafe-accept-any-ek", "--out", str(out)])

    assert code == 0
    assert "UNSAFE" in capsys.readouterr().out
    assert "NO vendor" in out.read_text()
    assert appraised(tpm.address, out).claims.kind == "tpm"


def test_another_tpm_is_refused_by_the_policy(tpm, tmp_path):
    out = tmp_path / "policy.toml"
    assert run_command(["enclave", "enrol", "--tpm", tpm.address, "--unsafe-accept-any-ek", "--out", str(out)]) == 0
    (tmp_path / "other").mkdir()
    other = BareTpm(tmp_path / "other")
    try:
        with pytest.raises(RefusedEvidenceError) as refusal:
            appraised(other.address, out)
    finally:
        other.close()

    assert refusal.value.reason == "wrong_signer"


def test_a_clients_tpm_is_enrolled_for_the_run_file(tpm, tmp_path, capsys):
    out = tmp_path / "north.toml"

    code = run_command(
        ["enclave", "enrol", "--tpm", tpm.address, "--unsafe-accept-any-ek", "--client", "north", "--out", str(out)]
    )

    assert code == 0
    assert "the owner adds it to the run file" in capsys.readouterr().out
    section = tomllib.loads(out.read_text())["split"]["client_policies"]["north"]
    policy = build_policy(PolicyConfig.model_validate_json(json.dumps(section)), tmp_path)
    with open_tpm(tpm.address) as device, TpmAttester(device) as attester:
        assert appraise_evidence(attester.make_evidence(BINDING), policy, BINDING, steady_now()).claims.kind == "tpm"


@pytest.mark.parametrize("given", [[], ["--root", "root.pem", "--unsafe-accept-any-ek"]])
def test_a_vendor_or_the_danger_has_to_be_named(tmp_path, given, capsys):
    assert run_command(["enclave", "enrol", *given, "--out", str(tmp_path / "policy.toml")]) == 2
    assert "--unsafe-accept-any-ek" in capsys.readouterr().err


def test_a_policy_that_is_there_is_not_overwritten(tmp_path, capsys):
    (tmp_path / "policy.toml").write_text("in use")

    assert run_command(["enclave", "enrol", "--unsafe-accept-any-ek", "--out", str(tmp_path / "policy.toml")]) == 2
    assert (tmp_path / "policy.toml").read_text() == "in use"


@pytest.mark.slow
@pytest.mark.skipif(bool(missing()), reason=f"not installed: {', '.join(missing())}")
def test_a_vendors_tpm_is_enrolled_by_its_certificate(tmp_path_factory, tmp_path, capsys):
    tpm = SoftwareTpm(tmp_path_factory.mktemp("tpm"))
    try:
        (tmp_path / "root.pem").write_bytes(tpm.roots)
        (tmp_path / "chain.pem").write_bytes(tpm.chain)
        (tmp_path / "ek.der").write_bytes(tpm.ek_certificate)
        files = ["--chain", str(tmp_path / "chain.pem"), "--ek", str(tmp_path / "ek.der")]
        asked = ["enclave", "enrol", "--tpm", tpm.address, *files]

        assert run_command([*asked, "--root", str(tmp_path / "root.pem"), "--out", str(tmp_path / "policy.toml")]) == 0
        assert "UNSAFE" not in capsys.readouterr().out
        assert appraised(tpm.address, tmp_path / "policy.toml").claims.kind == "tpm"
    finally:
        tpm.close()
