"""A bundle: one tar file whose every byte follows from its members, so that any changed byte is found.

Every header has fixed fields; a reader computes each header anew from name and size and compares 512 bytes. Members are
in the order of their names; the seal comes last and names the SHA-256 of each of the others. ``tar xf`` unpacks it.
"""

import re
from pathlib import Path

from .forms import Member, RefusedError, require

BLOCK = 512
MAX_MEMBERS = 100_000
SEAL = "seal.dsse.json"
"""Name of the last member: an in-toto statement whose subjects are all other members."""
_NAME = re.compile(r"[a-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*){0,4}")
_MAX_SIZE = 8**11 - 1


def make_header(name: str, size: int) -> bytes:
    """Return the one header that a member of this name and size has.

    Raises:
        ValueError: The name or size cannot be in a bundle.
    """
    if _NAME.fullmatch(name) is None or len(name) > 100 or not 0 <= size <= _MAX_SIZE:
        raise ValueError(f"member {name!r:.120} of {size} bytes cannot be in a bundle")
    fields = [
        name.encode().ljust(100, b"\0"),
        b"0000644\0" + b"0000000\0" * 2,
        b"%011o\0" % size + b"00000000000\0",
        b" " * 8,
        b"0" + b"\0" * 100,
        b"ustar\x0000" + b"\0" * 64,
        b"0000000\0" * 2 + b"\0" * 155,
    ]
    header = b"".join(fields).ljust(BLOCK, b"\0")
    return header[:148] + b"%06o\0 " % sum(header) + header[156:]


def read_bundle(path: Path) -> dict[str, Member]:
    """Return the members of a bundle; the seal is the last.

    Raises:
        RefusedError: A byte outside of the members is another than it must be.
        UnreadableError: It cannot be read.
    """
    archive, members, offset, last = Member.from_file(path), dict[str, Member](), 0, ""
    while True:
        header = archive.read_range(offset, BLOCK)
        if header == b"\0" * BLOCK:
            break
        name, size = _read_header(header, offset)
        require(len(members) < MAX_MEMBERS, f"{path}: more than {MAX_MEMBERS} members")
        is_next = SEAL not in members and (name == SEAL or name > last)
        require(is_next, f"{path}: member {name} is out of order, or there twice")
        last, members[name] = name, Member(path, offset + BLOCK, size)
        padding = archive.read_range(offset + BLOCK + size, -size % BLOCK)
        require(not any(padding), f"{path}: bytes behind member {name} were changed")
        offset += BLOCK + size + -size % BLOCK
    require(archive.read_range(offset, 2 * BLOCK) == b"\0" * 2 * BLOCK, f"{path}: its end was changed")
    require(archive.size == offset + 2 * BLOCK, f"{path}: there are bytes behind its end")
    require(SEAL in members, f"{path}: has no {SEAL}")
    return members


def _read_header(header: bytes, offset: int) -> tuple[str, int]:
    try:
        name, size = header[:100].rstrip(b"\0").decode("ascii"), int(header[124:135], 8)
        is_same = make_header(name, size) == header
    except ValueError as exc:
        raise RefusedError(f"no bundle, or altered: the header at byte {offset}: {exc}") from exc
    require(is_same, f"no bundle, or altered: the header at byte {offset}")
    return name, size
