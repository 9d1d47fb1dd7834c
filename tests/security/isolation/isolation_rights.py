"""Makes a test's process an ordinary one: of the same user, without root's rights."""

import ctypes


def drop_rights() -> None:
    """Drop all capabilities; what is left is what any process of this user may do."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    if ctypes.CDLL(None, use_errno=True).capset(header, (ctypes.c_uint32 * 6)()):
        raise OSError(ctypes.get_errno(), "capset")
