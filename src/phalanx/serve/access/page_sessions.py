"""Sessions of the chat page: a browser keeps a secret that ends with the server, and no key."""

import hashlib
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

LINK_S, SESSION_S = 600, 12 * 3600
MAX_SESSIONS = 16
"""Of one key; a further one ends the oldest."""
_LINK, _SESSION = "phl_", "phs_"


@dataclass(frozen=True)
class _Entry:
    """What a secret stands for; the secret itself is not held."""

    key_id: str
    end_s: float


class PageSessions:
    """Secrets that stand for a key, in the memory of one server.

    Args:
        now_s: A clock that never goes back.

    Guarantees:
        A link is good for one request within `LINK_S`, and a session for `SESSION_S`; both end with the process. Who
        reads a browser's memory of a page, or an address in its history, gets no key that outlives these.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._links: dict[bytes, _Entry] = {}
        self._sessions: dict[bytes, _Entry] = {}

    def make_link(self, key_id: str) -> str:
        """Return a secret that is good for one request in the name of a key."""
        return self._add_entry(self._links, _LINK, key_id, LINK_S)

    def open_session(self, key_id: str) -> str:
        """Return a secret that stands for a key."""
        now_s = self._now_s()
        self._sessions = {digest: entry for digest, entry in self._sessions.items() if entry.end_s > now_s}
        of_key = [digest for digest, entry in self._sessions.items() if entry.key_id == key_id]
        for digest in of_key[: max(0, len(of_key) - MAX_SESSIONS + 1)]:
            del self._sessions[digest]
        return self._add_entry(self._sessions, _SESSION, key_id, SESSION_S)

    def end_session(self, session: str) -> None:
        """End a session and everything that uses it, answers that are being sent included."""
        self._sessions.pop(bytes.fromhex(session), None)

    def is_open(self, session: str) -> bool:
        """Whether a session that `find_key` named goes on."""
        entry = self._sessions.get(bytes.fromhex(session))
        return entry is not None and entry.end_s > self._now_s()

    def find_key(self, secret: str) -> tuple[str, str] | None:
        """Return the key that a secret stands for, and the name of its session; a link is used up by that.

        Returns:
            The name is the secret's digest in hex, and empty for a link.
        """
        if secret.startswith(_LINK):
            entry = self._links.pop(_digest(secret), None)
        elif secret.startswith(_SESSION):
            entry = self._sessions.get(_digest(secret))
        else:
            return None
        if entry is None or entry.end_s <= self._now_s():
            return None
        return entry.key_id, _digest(secret).hex() if secret.startswith(_SESSION) else ""

    def _add_entry(self, entries: dict[bytes, _Entry], prefix: str, key_id: str, lasts_s: int) -> str:
        secret = prefix + secrets.token_hex(32)
        entries[_digest(secret)] = _Entry(key_id, self._now_s() + lasts_s)
        return secret


def _digest(secret: str) -> bytes:
    # 256 random bits: the time of a look-up by their digest tells nothing of them
    return hashlib.sha256(secret.encode("utf-8", "replace")).digest()
