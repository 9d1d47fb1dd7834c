"""Keys that AMD's secure processor derives for one guest: from the chip, and from the measurements of its report.

Tested against a device that a test plays; the hardware path is not tested by us.

Source: Linux, include/uapi/linux/sev-guest.h; AMD 56860 (SEV-SNP firmware ABI), MSG_KEY_REQ and MSG_KEY_RSP.
"""

import ctypes
import errno
import fcntl
import os
import struct
from collections.abc import Callable
from pathlib import Path

from phalanx.errors import NoEvidenceError

DEVICE = Path("dev/sev-guest")
KEY_BYTES = 32
_GET_DERIVED_KEY = 0xC0205301
"""_IOWR('S', 1, 32 bytes): version of the message, addresses of request and response, the firmware's error."""
_MESSAGE, _REQUEST = struct.Struct("=B7xQQQ"), struct.Struct("=IIQIIQ")
_STATUS = struct.Struct("=I28x")
_RESPONSE_BYTES = 64
_ROOT_OF_CHIP, _MOST_PRIVILEGED = 0, 0
_POLICY, _IMAGE, _FAMILY, _MEASUREMENT = 1, 2, 4, 8
BOUND_TO = _POLICY | _IMAGE | _FAMILY | _MEASUREMENT
"""What a guest must be started with to be given the key; not the versions of firmware, which get newer."""


def derive_guest_key(root: Path = Path("/"), ask: Callable[[Path, bytes], bytes] | None = None) -> bytes:
    """Return 32 bytes that this chip gives to guests of this launch measurement, policy, family and image alone.

    Raises:
        NoEvidenceError: There is no such device, not for this user, or the firmware refuses.
    """
    device = root / DEVICE
    request = _REQUEST.pack(_ROOT_OF_CHIP, 0, BOUND_TO, _MOST_PRIVILEGED, 0, 0)
    try:
        response = (ask or _ask_device)(device, request)
    except OSError as exc:
        raise NoEvidenceError(
            f"{device}: {exc.strerror or errno.errorcode.get(exc.errno or 0, 'failed')}; a key of an SEV-SNP guest "
            "needs the module sev-guest and the rights of root"
        ) from exc
    if len(response) != _RESPONSE_BYTES or _STATUS.unpack_from(response)[0]:
        raise NoEvidenceError(f"{device}: the firmware derives no key")
    key = response[_STATUS.size :]
    if not any(key):
        raise NoEvidenceError(f"{device}: the firmware derives a key of zeros")
    return key


def _ask_device(path: Path, request: bytes) -> bytes:
    asked = ctypes.create_string_buffer(request, len(request))
    answered = ctypes.create_string_buffer(_RESPONSE_BYTES)
    message = bytearray(_MESSAGE.pack(1, ctypes.addressof(asked), ctypes.addressof(answered), 0))
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.ioctl(fd, _GET_DERIVED_KEY, message)
    finally:
        os.close(fd)
    return answered.raw
