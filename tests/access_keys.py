"""An access directory with keys."""

from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from phalanx.security.crypto import steady_now
from phalanx.serve.access import KeyLimits, KeyStore, KeyTerms


class Keys(NamedTuple):
    """A store and how to make a key in it."""

    directory: Path
    store: KeyStore

    def make(self, owner: str = "alice", **terms) -> tuple[str, str]:
        return self.store.create_key(make_terms(owner, **terms))


def make_terms(owner: str = "alice", *, lasts: timedelta = timedelta(days=1), limits: dict | None = None, **terms):
    expires = int((steady_now() + lasts).timestamp())
    return KeyTerms(owner=owner, expires=expires, limits=KeyLimits(**(limits or {})), **terms)


def make_access(directory: Path) -> Keys:
    """Make an access directory without keys."""
    return Keys(directory, KeyStore.create(directory))
