"""Scans for links, images that load by themselves, and markup that acts in a page."""

import re
from collections.abc import Iterator, Sequence

from phalanx.serve.filters.note import Finding
from phalanx.serve.filters.scan import open_word

_LINK = re.compile(r"(?<![\w.])(?:https?|ftp|wss?)://([^\s/?#<>\"'()\[\]{}|\\^`]{1,300})", re.IGNORECASE)
_OTHER_LINK = re.compile(r"(?<!\w)(?:data:[\w/+.-]{0,64}[;,]|(?:javascript|vbscript|file):)\S", re.IGNORECASE)
_IMAGE = re.compile(r"!\[[^\]\n]{0,256}\](?:\(\s{0,4}<?|\[)|<(?:img|source|video|audio|link)\b", re.IGNORECASE)
_IMAGE_HOST = re.compile(
    r"(?:!\[[^\]\n]{0,256}\]\(\s{0,4}<?|<[a-z]{3,6}\b[^<>]{0,128}?(?:src|href)\s{0,4}=\s{0,4}[\"']?)"
    r"(?:https?:)?//([^\s/?#<>\"'()]{1,300})",
    re.IGNORECASE,
)
_MARKUP = re.compile(
    r"<(?:script|iframe|object|embed|form|svg|meta|style|base)\b|<[a-z]{1,16}\s[^<>]{0,256}?\bon[a-z]{3,20}\s{0,4}=",
    re.IGNORECASE,
)
_OPEN_TAG = re.compile(r"<(?:[a-z][^<>]{0,300})?\Z", re.IGNORECASE)
_OPEN_IMAGE = re.compile(r"!(?:\[[^\]\n]{0,256}(?:\](?:\([^)\n]{0,320})?)?)?\Z")


class Links:
    """Addresses whose host is not allowed, and addresses that are code or data."""

    trigger = r"://|:"

    def __init__(self, allowed_hosts: Sequence[str]) -> None:
        self._allowed = tuple(host.lower() for host in allowed_hosts)

    def find(self, text: str, is_cut: bool) -> Iterator[Finding]:
        """Name ``link`` or ``active_link``."""
        del is_cut
        findings = [Finding("active_link", *match.span()) for match in _OTHER_LINK.finditer(text)]
        for match in _LINK.finditer(text):
            if not is_allowed(match[1], self._allowed):
                findings.append(Finding("link", *match.span()))
        yield from sorted(findings, key=lambda finding: finding.start)

    def open_start(self, text: str) -> int:
        """A host ends with its word."""
        return open_word(text)


class Images:
    """Images and media whose address is fetched when a text is shown: the usual way to carry a chat away."""

    trigger = r"!\[|<"

    def __init__(self, allowed_hosts: Sequence[str]) -> None:
        self._allowed = tuple(host.lower() for host in allowed_hosts)

    def find(self, text: str, is_cut: bool) -> Iterator[Finding]:
        """Name ``image``; a reference, whose address stands elsewhere, counts as well."""
        del is_cut
        for match in _IMAGE.finditer(text):
            host = _IMAGE_HOST.match(text, match.start())
            if not host or not is_allowed(host[1], self._allowed):
                yield Finding("image", *match.span())

    def open_start(self, text: str) -> int:
        """An image or tag that has not ended."""
        return min(_open(_OPEN_IMAGE, text), _open(_OPEN_TAG, text))


class ActiveMarkup:
    """HTML that acts: scripts, frames, forms, handlers of events."""

    trigger = "<"

    def find(self, text: str, is_cut: bool) -> Iterator[Finding]:
        """Name ``active_markup``."""
        del is_cut
        return (Finding("active_markup", *match.span()) for match in _MARKUP.finditer(text))

    def open_start(self, text: str) -> int:
        """A tag that has not ended."""
        return _open(_OPEN_TAG, text)


def is_allowed(authority: str, hosts: Sequence[str]) -> bool:
    """Whether the host of an address is in a list, or below one in it; an address with a user name is none."""
    host = authority.lower().rpartition(":")[0] if ":" in authority else authority.lower()
    if "@" in authority or "%" in authority:
        return False
    return any(host == allowed or host.endswith("." + allowed) for allowed in hosts)


def _open(pattern: re.Pattern[str], text: str) -> int:
    match = pattern.search(text)
    return match.start() if match else len(text)
