"""The way to a TPM: addresses, answers that are none, and a TPM that goes away."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import TpmError
from phalanx.security.tee import TpmDevice, open_tpm
from phalanx.security.tee.tpm import device as tpm_device
from phalanx.security.tee.tpm.wire import TpmCommand, pcr_selection


class Says:
    """A link that answers whatever a test wants."""

    is_software = False

    def __init__(self, *answers: bytes) -> None:
        self.answers = list(answers)

    def exchange_command(self, command: bytes) -> bytes:
        if not self.answers:
            raise TpmError("nothing more to say")
        return self.answers.pop(0)

    def close(self) -> None:
        pass


def answer(body: bytes, code: int = 0, tag: int = 0x8001) -> bytes:
    return struct.pack(">HII", tag, 10 + len(body), code) + body


@pytest.mark.parametrize("address", ["", "mssim:host=x", "swtpm:", "swtpm:path", "swtpm:host=localhost", "device:"])
def test_an_address_of_another_form_is_refused(address):
    with pytest.raises(TpmError, match="expected device:PATH"):
        open_tpm(address)


def test_nobody_at_an_address_is_said(tmp_path):
    for address in (f"swtpm:path={tmp_path / 'absent'}", f"device:{tmp_path / 'absent'}"):
        with pytest.raises(TpmError, match="cannot be opened"):
            open_tpm(address)


@pytest.mark.parametrize(
    "data",
    [b"", b"\x80\x01", answer(b""), answer(b"\0" * 4) + b"\0", answer(b"", tag=0x1234), answer(b"\0", tag=0x8002)],
)
def test_an_answer_that_is_none_is_refused(data):
    with pytest.raises(TpmError):
        TpmDevice(Says(data)).read_manufacturer()


@given(st.binary(max_size=120))
def test_whatever_a_tpm_says_is_an_answer_or_an_error_of_ours(data):
    device = TpmDevice(Says(*[answer(data, tag=tag) for tag in (0x8001, 0x8002)] * 3))
    pcrs, memory = (lambda: device.read_pcrs((0, 7))), (lambda: device.read_memory(1))
    for ask, kind in ((device.read_manufacturer, str), (pcrs, dict), (memory, bytes)):
        for _ in range(2):
            try:
                said = ask()
            except TpmError:
                continue
            assert isinstance(said, kind)


def test_a_refusal_carries_the_code_of_the_tpm():
    with pytest.raises(TpmError, match="0x98e") as caught:
        TpmDevice(Says(answer(b"", 0x98E))).read_pcrs((0,))

    assert caught.value.response == 0x98E


def test_a_command_that_a_busy_tpm_did_not_begin_is_sent_again(monkeypatch):
    monkeypatch.setattr(tpm_device, "_PAUSES_S", (0.0, 0.0))
    busy, made_by = answer(b"", 0x922), bytes(13) + b"IBM\0"

    assert TpmDevice(Says(busy, busy, answer(made_by))).read_manufacturer() == "IBM"
    with pytest.raises(TpmError, match="0x922"):
        TpmDevice(Says(busy, busy, busy)).read_manufacturer()


def test_a_tpm_without_a_sha256_bank_is_refused():
    nothing_selected = bytes(4) + struct.pack(">IHB", 1, 0x000B, 3) + bytes(3) + bytes(4)

    with pytest.raises(TpmError, match="SHA-256 bank"):
        TpmDevice(Says(answer(nothing_selected))).read_pcrs((0,))


@pytest.mark.parametrize("indexes", [(), (24,), (-1,)])
def test_pcrs_that_no_tpm_has_are_refused(indexes):
    with pytest.raises(TpmError, match="0 to 23"):
        pcr_selection(indexes)


def test_all_pcrs_are_read_although_a_tpm_gives_eight_at_once(device):
    assert list(device.read_pcrs(range(24))) == list(range(24))


def test_a_tpm_that_goes_away_is_an_error_of_ours(bare_tpm):
    with bare_tpm.open() as device:
        assert device.read_manufacturer() == "IBM"
        bare_tpm.close()

        with pytest.raises(TpmError, match="connection"):
            device.send_command(TpmCommand.PCR_READ, (), pcr_selection((0,)))
