import pytest
from typer.testing import CliRunner

from phalanx.cli.parties.pki import pki_app
from phalanx.errors import CertificateError


def invoke(*arguments):
    return CliRunner().invoke(pki_app, [str(argument) for argument in arguments])


def test_init_issue_and_show_work_together(tmp_path):
    keys = tmp_path / "keys"

    assert invoke("init", keys, "--days", 30).exit_code == 0
    assert invoke("issue", keys, "worker-1", "--host", "gpu.example.org", "--host", "10.0.0.7").exit_code == 0
    shown = invoke("show", keys / "worker-1" / "certificate.pem")

    assert shown.exit_code == 0
    assert "party        worker-1" in shown.output
    assert "gpu.example.org, 10.0.0.7" in shown.output
    assert "checked" in shown.output
    assert "authority" in invoke("show", keys / "authority.pem").output


def test_no_command_prints_a_private_key(tmp_path):
    output = invoke("init", tmp_path / "keys").output + invoke("issue", tmp_path / "keys", "worker").output

    assert "PRIVATE" not in output


def test_an_existing_authority_is_our_error(tmp_path):
    invoke("init", tmp_path / "keys")

    result = invoke("init", tmp_path / "keys")

    assert isinstance(result.exception, CertificateError)


@pytest.mark.parametrize("command", [[], ["init"], ["issue"], ["show"]])
def test_every_help_has_an_example(command):
    result = invoke(*command, "--help")

    assert result.exit_code == 0
    assert "Example: phalanx pki" in " ".join(result.output.split())
