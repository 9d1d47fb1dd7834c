"""Split view: an address that gave a recorder one content and gives a reader another one now."""

import base64
import re
from pathlib import Path
from typing import Literal

from phalanx.data.rules.page import Page
from phalanx.data.rules.rule import Outcome
from phalanx.data.rules.word_files import read_entries
from phalanx.data.scan.word_stream import ScanSettings, escape_invisible, outcome_of
from phalanx.data.sources.source import Origin
from phalanx.errors import DataError

_SIZES = {"sha1": 20, "sha256": 32}


class SplitViewConfig(ScanSettings):
    """Compares digests of fetched payloads with recorded ones.

    Attributes:
        recorded: Lists of a third party, one ``sha256:digest address`` a line, that speak of documents by address.
        without_digest: Outcome of a document without a recorded digest, or with one that cannot be compared.
    """

    kind: Literal["split_view"] = "split_view"
    recorded: tuple[Path, ...] = ()
    without_digest: Literal["pass", "quarantine"] = "pass"


class SplitView:
    """Sets aside payloads that differ from the record; an unreadable record proves nothing and is set aside.

    Guarantees:
        Finds content that was changed after it was recorded. Does not find content that was bad when it was recorded,
        and an archive's own digest is written by the hand that wrote the archive: only a list of another party
        (`recorded`) speaks against it.
    """

    def __init__(self, config: SplitViewConfig) -> None:
        self._config = config
        self._recorded: dict[str, str] = {}
        for entry in read_entries(config.recorded):
            digest, _, url = entry.partition(" ")
            if read_digest(digest) is None or not url.strip():
                raise DataError(f"split_view: found the line {entry[:80]!r}, expected `sha256:digest address`")
            self._recorded[url.strip()] = digest

    def judge_page(self, page: Page) -> Outcome:
        """Ask the reader about the archive's own digest, and compare with the digest of a list."""
        origin = page.document.origin
        claim = origin.recorded_digest if origin else None
        if claim and read_digest(claim) is None:
            return outcome_of(self._config, "recorded digest", f"{claim[:80]!r} is not sha1 or sha256")
        if origin and origin.digest_holds is False:
            return outcome_of(
                self._config, "split view", f"recorded {escape_invisible(str(claim))[:80]}, fetched something else"
            )
        listed = read_digest(self._recorded.get(origin.url, "")) if origin and origin.url else None
        fetched = _fetched_digests(origin, listed[0]) if origin and listed else set()
        if listed and fetched and listed[1] not in fetched:
            mismatch = f"a list has {listed[1].hex()}, fetched {min(fetched).hex()}, {listed[0]}"
            return outcome_of(self._config, "split view", mismatch)
        if self._config.without_digest == "quarantine" and not fetched and not (origin and origin.digest_holds):
            return outcome_of(self._config, "recorded digest", "nothing that can be compared")
        return None


def _fetched_digests(origin: Origin, algorithm: str) -> set[bytes]:
    """Return the digests of the fetched bytes: of the record, and of its payload where the reader has checked it."""
    claims = [f"sha256:{origin.raw_digest}", (origin.recorded_digest or "") if origin.digest_holds else ""]
    digests = [read_digest(claim) for claim in claims]
    return {digest[1] for digest in digests if digest and digest[0] == algorithm}


def read_digest(claim: str) -> tuple[str, bytes] | None:
    """Return algorithm and bytes of ``algorithm:value``, in hex or, as WARC writes it, in base32; else None."""
    name, _, value = claim.strip().partition(":")
    algorithm = name.lower().replace("-", "")
    size = _SIZES.get(algorithm)
    if size is None:
        return None
    if re.fullmatch(rf"[0-9a-fA-F]{{{2 * size}}}", value):
        return algorithm, bytes.fromhex(value)
    try:
        content = base64.b32decode(value.upper() + "=" * (-len(value) % 8))
    except ValueError:
        return None
    return (algorithm, content) if len(content) == size else None
