"""Workers behind pipes of their own: they multiply as others do, and no other process is at the end of a pipe."""

import socket
import threading

import numpy as np
import pytest

from phalanx.errors import CertificateError, FrameError, PeerLostError
from phalanx.security.crypto import create_authority, issue_certificate, load_identity
from phalanx.security.mask import MaskedMessage, ProductMessage
from phalanx.split.masked.remote import PipedWorkerConfig, PipeWires, piped_workers, serve_pipe
from phalanx.transport import TransportConfig

LIMITS = TransportConfig(timeout_s=5.0)
PRODUCT = ProductMessage("layer", "forward")


@pytest.fixture
def pki(tmp_path):
    create_authority(tmp_path / "pki", 5)
    for name in ("enclave", "masked-0"):
        issue_certificate(tmp_path / "pki", name, ("localhost",), 5)
    return tmp_path / "pki"


def pem_of(pki, name):
    return (pki / name / "certificate.pem").read_text()


def config_of(pki):
    return PipedWorkerConfig(
        identity=str(pki / "masked-0"), owner_certificate=pem_of(pki, "enclave"), session="s", transport=LIMITS
    )


def test_a_worker_behind_a_pipe_multiplies_and_ends_in_good_order(pki):
    near, far = socket.socketpair()
    worker = threading.Thread(target=serve_pipe, args=(config_of(pki), far))
    worker.start()
    matrix = np.arange(12, dtype=np.int32).reshape(4, 3)
    rows = np.arange(8, dtype=np.int32).reshape(2, 4)

    with piped_workers(
        load_identity(pki / "enclave"), {"masked-0": pem_of(pki, "masked-0")}, {"masked-0": near}, "s", LIMITS
    ) as found:
        found["masked-0"].load_matrix(PRODUCT, matrix)
        (answer,) = found["masked-0"].multiply_masked([MaskedMessage(PRODUCT, 1, rows)])

    worker.join(120.0)
    assert not worker.is_alive()
    assert np.array_equal(answer.values, rows @ matrix)


def test_a_worker_whose_enclave_is_gone_ends(pki, monkeypatch):
    monkeypatch.setattr("phalanx.split.masked.remote._LOOK_S", 0.0)
    near, far = socket.socketpair()
    near.close()

    with pytest.raises(PeerLostError, match="closed"):
        serve_pipe(config_of(pki), far)


def test_a_certificate_of_another_authority_is_refused(pki, tmp_path):
    create_authority(tmp_path / "other", 5)
    issue_certificate(tmp_path / "other", "masked-0", ("localhost",), 5)
    near, far = socket.socketpair()

    with (
        far,
        pytest.raises(CertificateError),
        piped_workers(
            load_identity(pki / "enclave"),
            {"masked-0": pem_of(tmp_path / "other", "masked-0")},
            {"masked-0": near},
            "s",
            LIMITS,
        ),
    ):
        pytest.fail("was let in")


def test_there_is_no_way_to_who_has_no_pipe():
    with pytest.raises(FrameError, match="no pipe"):
        PipeWires("enclave", {}).deliver_frame("masked-1", b"x", 1.0)
