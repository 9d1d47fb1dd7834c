"""Drops documents by address, from lists of the user's; nothing is looked up in the network."""

import fnmatch
import re
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlsplit

from pydantic import Field

from phalanx.data.rules.page import Page
from phalanx.data.rules.rule import Drop, Outcome, Quarantine, RuleReason, RuleSettings
from phalanx.data.rules.word_files import read_entries
from phalanx.errors import DataError

_MAX_PATTERNS = 1_000
_MAX_URL_CHARACTERS = 8_192
_HOSTS_FILE = re.compile(r"(?:0\.0\.0\.0|127\.0\.0\.1)\s+(\S+)")
_STARS = re.compile(r"\*{2,}")


class UrlBlocklistConfig(RuleSettings):
    """Lists of domains and addresses, one a line.

    A line is a domain (``example.org``, with all below it; also as in a hosts file), a domain with the beginning of a
    path (``example.org/private``), or an address without ``https://`` in which ``*`` stands for anything
    (``*.example.org/*/ads/*``).
    """

    kind: Literal["url_blocklist"] = "url_blocklist"
    files: tuple[Path, ...] = Field(min_length=1)
    without_url: Literal["pass", "quarantine"] = "pass"


class UrlBlocklist:
    """Drops by address; an address that cannot be read is set aside."""

    def __init__(self, config: UrlBlocklistConfig) -> None:
        self._without = config.without_url
        self._domains: set[str] = set()
        self._paths: dict[str, list[str]] = {}
        stars: list[str] = []
        for entry in read_entries(config.files):
            hosts_file = _HOSTS_FILE.match(entry)
            address = hosts_file[1] if hosts_file else re.sub(r"^https?://", "", entry)
            if "*" in address:
                stars.append(_STARS.sub("*", address.lower()))
                continue
            host, _, path = address.partition("/")
            if path:
                self._paths.setdefault(_plain_host(host), []).append("/" + unquote(path))
            else:
                self._domains.add(_plain_host(host))
        if len(stars) > _MAX_PATTERNS:
            raise DataError(
                f"url_blocklist: {len(stars)} lines with a *, at most {_MAX_PATTERNS}; list domains instead"
            )
        # fnmatch writes each * as an atomic group, which never goes back
        self._stars = [(star, re.compile(fnmatch.translate(star))) for star in stars]

    def judge_page(self, page: Page) -> Outcome:
        """Drop with the line of the list that the address falls under."""
        origin = page.document.origin
        url = origin.url if origin else None
        if not url:
            return Quarantine(RuleReason("url", "none is recorded")) if self._without == "quarantine" else None
        try:
            parts = urlsplit(url if "//" in url else f"//{url}")
            host, path = _plain_host(parts.hostname or ""), unquote(parts.path)
        except ValueError:
            return Quarantine(RuleReason("url", "cannot be read"))
        if not host or len(url) > _MAX_URL_CHARACTERS:
            return Quarantine(RuleReason("url", "cannot be read" if not host else f"{len(url)} characters"))
        entry = self._entry_for(host, path, f"{host}{path}{'?' if parts.query else ''}{parts.query}".lower())
        return Drop(RuleReason("url", entry)) if entry else None

    def _entry_for(self, host: str, path: str, whole: str) -> str | None:
        labels = host.split(".")
        for first in range(len(labels)):
            domain = ".".join(labels[first:])
            if domain in self._domains:
                return domain
            for beginning in self._paths.get(domain, ()):
                if path == beginning or path.startswith(beginning if beginning.endswith("/") else beginning + "/"):
                    return domain + beginning
        return next((star for star, pattern in self._stars if pattern.match(whole)), None)


def _plain_host(host: str) -> str:
    """Return a host as lists and addresses share it: in lower case and ASCII, without port and outer dots."""
    host = host.partition(":")[0].strip().strip(".").lower()
    if host.isascii():
        return host
    try:
        return host.encode("idna").decode()
    except UnicodeError:
        return host
