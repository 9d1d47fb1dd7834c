"""Provenance manifests inside plain text: found, checked for their form and set aside; their signature is not judged.

Source: C2PA Technical Specification 2.4, annex A.8 (C2PATextManifestWrapper).
"""

import re
from dataclasses import dataclass

_MARKER = "\ufeff"
_MAGIC = b"C2PATXT\0"
_VERSION = 1
_HEADER_BYTES = len(_MAGIC) + 1 + 4
_PADDING = frozenset({0x00, 0x10})
_MIN_BOX_BYTES = 8
_RUN = re.compile(f"{_MARKER}([\ufe00-\ufe0f\U000e0100-\U000e01ef]{{{_HEADER_BYTES + _MIN_BOX_BYTES},}})")


@dataclass(frozen=True)
class TextWrapper:
    """One well-formed wrapper.

    Attributes:
        start: Place of the U+FEFF, counted in characters.
        end: Place behind the last selector, counted in characters.
        manifest: The manifest store, one JUMBF box.
    """

    start: int
    end: int
    manifest: bytes


def find_wrappers(text: str) -> list[TextWrapper]:
    """Return every well-formed wrapper of a text, in order."""
    if _MARKER not in text:
        return []
    wrappers = []
    for match in _RUN.finditer(text):
        manifest = _parse_manifest(_decode_selectors(match[1]))
        if manifest is not None:
            wrappers.append(TextWrapper(match.start(), match.end(), manifest))
    return wrappers


def set_aside(text: str) -> tuple[str, TextWrapper | None]:
    """Return a text without its wrapper, and the wrapper.

    A text with two wrappers has none that counts (annex A.8.4): it is returned as it is, and its invisible characters
    are judged like all others.
    """
    wrappers = find_wrappers(text)
    if len(wrappers) != 1:
        return text, None
    (wrapper,) = wrappers
    return text[: wrapper.start] + text[wrapper.end :], wrapper


def make_wrapper(manifest: bytes) -> str:
    """Return the characters of a wrapper around a manifest store."""
    content = _MAGIC + bytes([_VERSION]) + len(manifest).to_bytes(4, "big") + manifest
    return _MARKER + "".join(chr(0xFE00 + byte) if byte < 16 else chr(0xE0100 + byte - 16) for byte in content)


def _decode_selectors(run: str) -> bytes:
    return bytes(ord(mark) - 0xFE00 if mark <= "\ufe0f" else ord(mark) - 0xE0100 + 16 for mark in run)


def _parse_manifest(content: bytes) -> bytes | None:
    """Return the manifest store of a wrapper's bytes; None where they are malformed."""
    if not content.startswith(_MAGIC + bytes([_VERSION])):
        return None
    size = int.from_bytes(content[_HEADER_BYTES - 4 : _HEADER_BYTES], "big")
    manifest, padding = content[_HEADER_BYTES : _HEADER_BYTES + size], content[_HEADER_BYTES + size :]
    is_box = len(manifest) == size >= _MIN_BOX_BYTES and manifest[4:8] == b"jumb"
    if not is_box or int.from_bytes(manifest[:4], "big") != size or not _PADDING.issuperset(padding):
        return None
    return manifest
