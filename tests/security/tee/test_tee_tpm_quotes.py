"""A TPM's quote beside its PCR values, and the way to a TPM: a device or a socket that answers, or does not."""

import contextlib
import hashlib
import os
import socket
import threading

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding
from refusals import refusal
from tcg import PCRS, Tpm, pcr_values, tpm2b

from phalanx.config import canonical_json
from phalanx.errors import TpmError
from phalanx.security.tee import Evidence
from phalanx.security.tee.claims import Reference
from phalanx.security.tee.formats.chain import Trust
from phalanx.security.tee.tpm.link import open_link
from phalanx.security.tee.tpm.quote import appraise_tpm, check_quote, inspect_tpm


@pytest.fixture(scope="module", params=["ecc", "rsa"])
def tpm(request):
    return Tpm(request.param)


def evidence(data: bytes, binding, pcrs: bytes | None = None) -> Evidence:
    return Evidence("tpm", data, {"pcrs": pcr_values(PCRS) if pcrs is None else pcrs}, binding)


def test_a_quote_by_the_key_over_the_values_beside_it_passes(tpm, binding):
    quote, values = check_quote(evidence(tpm.quote(b"nonce"), binding), tpm.ak.public_key())

    assert quote.extra_data == b"nonce"
    assert values == {"sha256.0": PCRS[0].hex(), "sha256.7": PCRS[7].hex()}
    assert inspect_tpm(evidence(tpm.quote(b"nonce"), binding)) == values


def test_a_quote_of_another_key_or_of_another_kind_of_key_is_refused(tpm, binding):
    data = evidence(tpm.quote(b"nonce"), binding)
    other = Tpm("rsa" if tpm.kind == "ecc" else "ecc")

    assert refusal(lambda: check_quote(data, other.ak.public_key())) == "wrong_signer"
    curve = Tpm("ecc")
    assert refusal(lambda: check_quote(evidence(curve.quote(b""), binding), Tpm("ecc").ak.public_key())) == (
        "bad_signature"
    )


@pytest.mark.parametrize(
    "values",
    [
        b"",
        b"[]",
        canonical_json({}),
        canonical_json({"sha256": {"0": PCRS[0].hex()}}),
        canonical_json({"sha256": {"0": PCRS[0].hex(), "7": PCRS[7].hex(), "8": "00" * 32}}),
        canonical_json({"sha256": {"0": PCRS[0].hex(), "7": PCRS[7].hex()}, "sha1": {}}),
        canonical_json({"sha256": {"0": PCRS[0].hex(), "8": PCRS[7].hex()}}),
        canonical_json({"sha256": {"0": PCRS[0].hex(), "7": "00" * 31}}),
        canonical_json({"sha256": {"0": PCRS[0].hex(), "7": "0G" * 32}}),
        canonical_json({"sha256": {"0": PCRS[0].hex(), "7": "AB" * 32}}),
        canonical_json({"sha256": {"0": PCRS[0].hex(), "7": 7}}),
        canonical_json({"sha256": [PCRS[0].hex(), PCRS[7].hex()]}),
        pcr_values(PCRS) + b" ",
    ],
    ids=["empty", "list", "no bank", "one fewer", "one more", "another bank", "other names", "short", "no hex",
         "upper case", "number", "list of values", "not canonical"],
)  # fmt: skip
def test_values_are_exactly_the_selected_ones(values, binding):
    tpm = Tpm()

    assert refusal(lambda: inspect_tpm(evidence(tpm.quote(b""), binding, values))) == "malformed"


def test_values_of_another_state_are_refused(binding):
    tpm = Tpm()
    other = pcr_values({0: PCRS[0], 7: b"\x08" * 32})

    assert refusal(lambda: check_quote(evidence(tpm.quote(b""), binding, other), tpm.ak.public_key())) == (
        "wrong_measurement"
    )


def test_a_hash_that_does_not_belong_to_the_curve_or_is_weak_is_refused(binding):
    tpm = Tpm()
    data = tpm.quote(b"")
    size = 2 + int.from_bytes(data[:2], "big")
    for name in (b"\0\x0c", b"\0\x04"):
        altered = data[: size + 2] + name + data[size + 4 :]
        assert refusal(lambda altered=altered: check_quote(evidence(altered, binding), tpm.ak.public_key())) == (
            "malformed"
        )


def test_a_quote_signed_with_pss_passes(binding):
    class PssTpm(Tpm):
        def sign(self, attest: bytes) -> bytes:
            scheme = padding.PSS(padding.MGF1(hashes.SHA256()), 32)
            return b"\0\x16\0\x0b" + tpm2b(self.ak.sign(attest, scheme, hashes.SHA256()))

    tpm = PssTpm("rsa")

    assert check_quote(evidence(tpm.quote(b"n"), binding), tpm.ak.public_key())[0].extra_data == b"n"
    flipped = bytearray(tpm.quote(b"n"))
    flipped[-1] ^= 1
    assert refusal(lambda: check_quote(evidence(bytes(flipped), binding), tpm.ak.public_key())) == "bad_signature"


def test_a_bank_of_sha1_counts_only_where_the_policy_accepts_it(binding):
    class OldTpm(Tpm):
        def quote(self, extra: bytes, **changes):
            pcr = b"\x05" * 20
            attest = b"\xffTCG\x80\x18" + tpm2b(b"\0\x0b" + bytes(32)) + tpm2b(extra) + bytes(16) + b"\x01" + bytes(8)
            attest += b"\0\0\0\x01\0\x04\x03\x01\0\0" + tpm2b(hashlib.sha256(pcr).digest())
            return tpm2b(attest) + self.sign(attest)

    case = OldTpm().case(binding).with_endorsement("pcrs", canonical_json({"sha1": {"0": "05" * 20}}))
    case = case.with_reference(measurements={"sha1.0": ("05" * 20,)})

    assert refusal(case.appraise) == "forbidden_mode"
    assert case.with_reference(accept_sha1_bank=True).appraise()


def test_a_reference_of_another_kind_is_a_fault_of_the_caller(binding):
    with pytest.raises(TypeError, match="expected TpmReference"):
        appraise_tpm(evidence(b"", binding), Reference(measurements={"a": ("00" * 32,)}), Trust((), None))


# the way to a TPM


def response(body: bytes, size: int | None = None) -> bytes:
    return b"\x80\x01" + (10 + len(body) if size is None else size).to_bytes(4, "big") + bytes(4) + body


@contextlib.contextmanager
def socket_tpm(path, *answers: bytes):
    """A software TPM that answers each command with these bytes, in two pieces, and then hangs up."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            for data in answers:
                if connection.recv(4096):
                    connection.sendall(data[:7])
                    connection.sendall(data[7:])

    thread = threading.Thread(target=serve)
    thread.start()
    link = open_link(f"swtpm:path={path}")
    try:
        yield link
    finally:
        link.close()
        thread.join()
        listener.close()


def test_responses_come_whole_through_a_socket_each_of_the_length_in_its_header(tmp_path):
    with socket_tpm(tmp_path / "tpm", response(b"first"), response(b"")) as link:
        assert link.is_software
        assert link.exchange_command(b"command") == response(b"first")
        assert link.exchange_command(b"command") == response(b"")
        with pytest.raises(TpmError, match="connection"):
            link.exchange_command(b"command")


@pytest.mark.parametrize(
    ("data", "message"),
    [(response(b"", 9), "9 bytes"), (response(b"", 4097), "4097 bytes"), (response(b"ab", 13), "middle"),
     (b"", "middle")],
    ids=["below a header", "above the limit", "cut", "nothing"],
)  # fmt: skip
def test_a_response_of_another_length_is_refused(tmp_path, data, message):
    with socket_tpm(tmp_path / "tpm", data) as link, pytest.raises(TpmError, match=message):
        link.exchange_command(b"command")


def test_a_response_of_the_largest_size_is_read(tmp_path):
    with socket_tpm(tmp_path / "tpm", response(bytes(4086))) as link:
        assert len(link.exchange_command(b"command")) == 4096


def test_a_device_is_written_and_read_and_closed_once(tmp_path):
    path = tmp_path / "tpmrm0"
    path.write_bytes(b"")
    link = open_link(f"device:{path}")

    assert link.exchange_command(b"command") == b""
    assert (path.read_bytes(), link.is_software) == (b"command", False)
    link.close()
    link.close()
    with pytest.raises(TpmError, match=str(path)):
        link.exchange_command(b"command")


@pytest.mark.parametrize(
    "address",
    ["", "device:", "tpm:x", "swtpm:", "swtpm:path", "swtpm:host=localhost", "swtpm:host=localhost,port=many",
     "swtpm:path=a,port=1"],
)  # fmt: skip
def test_addresses_of_another_form_are_refused(address):
    with pytest.raises(TpmError, match="expected device:PATH"):
        open_link(address)


def test_a_tpm_over_the_network_is_reached_by_host_and_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        link = open_link(f"swtpm:host=127.0.0.1,port={listener.getsockname()[1]}")
        link.close()
        port = listener.getsockname()[1]
    with pytest.raises(TpmError, match="cannot be opened"):
        open_link(f"swtpm:host=127.0.0.1,port={port}")
    with pytest.raises(TpmError, match="cannot be opened"):
        open_link(f"device:{os.devnull}/absent")
