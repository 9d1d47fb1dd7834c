"""A probe asks with its key by TLS, and says why a server is not well without saying the key."""

import pytest

from phalanx.serve import probe
from tiny_served import add_key, running_server, serve_model, write_model


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("probed")
    _, secret = add_key(folder / "access", role="operator")
    (folder / "probe.key").write_text(secret + "\n")
    with running_server([serve_model(write_model(folder / "models"))], folder / "access") as (url, _):
        yield folder, int(url.rpartition(":")[2]), secret


def run_probe(folder, port, *more, path="/health/ready", key="probe.key"):
    return probe.main(["--port", str(port), "--path", path, "--key-file", str(folder / key), *more])


def test_a_server_that_takes_requests_is_well_and_one_path_is_not_another(server, capsys):
    folder, port, _ = server

    assert run_probe(folder, port) == 0
    assert run_probe(folder, port, path="/health/live") == 0
    assert run_probe(folder, port, path="/nothing") == 1
    assert "status 404" in capsys.readouterr().err


def test_without_a_good_key_even_a_live_probe_fails_and_no_key_is_written(server, capsys):
    folder, port, secret = server
    (folder / "wrong.key").write_text(secret[:-1] + ("a" if secret[-1] != "a" else "b"))

    assert run_probe(folder, port, "--any-status", key="wrong.key") == 1
    assert run_probe(folder, port, key="no such file") == 1
    (folder / "forged.key").write_text("x\r\nHost: elsewhere")
    assert run_probe(folder, port, key="forged.key") == 1
    errors = capsys.readouterr().err
    assert "status 401" in errors and secret[:-1] not in errors and "elsewhere" not in errors


def test_nobody_listening_and_a_server_without_tls_are_faults(server, capsys, tmp_path):
    folder, port, _ = server
    authority = tmp_path / "ca.crt"
    authority.write_text("no certificate")

    assert run_probe(folder, 1) == 1
    assert run_probe(folder, port, "--authority", str(authority)) == 1
    assert capsys.readouterr().err.count("probe: ") == 2
