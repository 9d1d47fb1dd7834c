"""AWS Nitro attestation documents, asked of the Nitro Secure Module.

Tested against a module that a test plays; the hardware path is not tested by us.

Source: Linux, include/uapi/linux/nsm.h; AWS, Nitro Secure Module API (requests and responses in CBOR).
"""

import ctypes
import fcntl
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from phalanx.errors import NoEvidenceError, RefusedEvidenceError
from phalanx.security.tee.binding import Binding
from phalanx.security.tee.evidence import Evidence
from phalanx.security.tee.formats.cbor import decode_cbor, encode_cbor

DEVICE = Path("dev/nsm")
_RAW = 0xC0200A00
"""_IOWR(0x0A, 0, 32 bytes): address and length of the request, then of the response."""
_MESSAGE = struct.Struct("=QQQQ")
_MAX_RESPONSE_BYTES = 0x3000
_WHERE = "Nitro Secure Module"


class NsmAttester:
    """An attester that asks the module for a document with a binding as its user data."""

    kind = "nitro"

    def __init__(self, root: Path = Path("/"), ask: Callable[[Path, bytes], bytes] | None = None) -> None:
        self._device, self._ask = root / DEVICE, ask or _ask_device

    def make_evidence(self, binding: Binding) -> Evidence:
        """Have the hypervisor sign a binding."""
        request = encode_cbor(
            {"Attestation": {"user_data": binding.binding_digest(), "nonce": None, "public_key": None}}
        )
        try:
            answer: Any = decode_cbor(self._ask(self._device, request), _WHERE)
        except OSError as exc:
            raise NoEvidenceError(f"{self._device}: {exc.strerror}; is this a Nitro enclave?") from exc
        except RefusedEvidenceError as exc:
            raise NoEvidenceError(f"{_WHERE}: its response cannot be read ({exc.detail})") from exc
        return Evidence(self.kind, _extract_document(answer), {}, binding)


def _extract_document(answer: Any) -> bytes:
    if isinstance(answer, dict) and isinstance(answer.get("Error"), str):
        raise NoEvidenceError(f"{_WHERE}: refuses with {answer['Error'][:40]}")
    try:
        document = answer["Attestation"]["document"]
    except (KeyError, TypeError, IndexError) as exc:
        raise NoEvidenceError(f"{_WHERE}: its response holds no document") from exc
    if not isinstance(document, bytes):
        raise NoEvidenceError(f"{_WHERE}: its document is no bytes")
    return document


def _ask_device(path: Path, request: bytes) -> bytes:
    asked, answered = (
        ctypes.create_string_buffer(request, len(request)),
        ctypes.create_string_buffer(_MAX_RESPONSE_BYTES),
    )
    message = bytearray(
        _MESSAGE.pack(ctypes.addressof(asked), len(request), ctypes.addressof(answered), _MAX_RESPONSE_BYTES)
    )
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.ioctl(fd, _RAW, message)
    finally:
        os.close(fd)
    return answered.raw[: min(_MESSAGE.unpack(message)[3], _MAX_RESPONSE_BYTES)]
