"""Scans for personal data and secrets: the rules of data builds, on a text that may still grow."""

import re
from collections.abc import Iterator

from phalanx.data.rules.pii import find_personal_data, open_address_start, to_ascii_signs
from phalanx.data.rules.secrets import SHAPES, find_secrets
from phalanx.serve.filters.note import Finding
from phalanx.serve.filters.scan import open_number, open_word

_KEY_BLOCK = "-----BEGIN "
_KEY_HEADER_CHARACTERS = 64
_LONG_TOKEN = re.compile(r"(?<![\w.-])eyJ[\w-]{10,4096}\.eyJ[\w-]{4,8192}(?:\.[\w-]{0,2048})?\Z", re.ASCII)


class PersonalData:
    """E-mail and IP addresses, phone, card, account and national numbers, by form and checksum."""

    trigger = r"[@\uff20\d]"

    def find(self, text: str, is_cut: bool) -> Iterator[Finding]:
        """Name the kinds of the data rule ``pii``."""
        del is_cut
        for span in find_personal_data(text):
            yield Finding(span.kind, span.start, span.end)

    def open_start(self, text: str) -> int:
        """A number may have a further group, an address a further part."""
        return min(open_number(to_ascii_signs(text).replace("\u2013", "-")), open_address_start(text))


class SecretValues:
    """Private keys, tokens with their issuer's mark, passwords in addresses and named values."""

    trigger = "|".join(re.escape(anchor) for shape in SHAPES for anchor in shape.anchors)

    def find(self, text: str, is_cut: bool) -> Iterator[Finding]:
        """Name the kinds of the data rule ``secrets``; of a cut text a web token without its signature counts."""
        for span in find_secrets(text):
            yield Finding(span.kind, span.start, span.end)
        if is_cut:
            match = _LONG_TOKEN.search(text)
            if match:
                yield Finding("jwt", match.start(), match.end())

    def open_start(self, text: str) -> int:
        """The last word, or a key block's first line."""
        block = text.rfind(_KEY_BLOCK, max(0, len(text) - _KEY_HEADER_CHARACTERS))
        start = open_word(text)
        return min(start, block) if block >= 0 else start
