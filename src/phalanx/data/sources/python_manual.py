"""The language reference that CPython carries."""

import hashlib
from collections.abc import Iterator
from pydoc_data.topics import topics
from typing import Literal

from phalanx.config import canonical_json
from phalanx.data.sources.source import Document, SourceSettings


class PythonManualConfig(SourceSettings):
    """The language reference that CPython carries (``pydoc_data.topics``); one document per topic."""

    kind: Literal["python_manual"] = "python_manual"


class PythonManual:
    """One document per topic of ``help()``, about 0.46 MB of English; differs between Python versions."""

    def __init__(self, config: PythonManualConfig) -> None:
        self._kind = config.kind

    def fingerprint(self) -> str:
        """Digest of all topics."""
        return hashlib.sha256(canonical_json([self._kind, topics])).hexdigest()

    def documents(self) -> Iterator[Document]:
        """Topics by name."""
        for name, text in sorted(topics.items()):
            yield Document(f"Python manual, topic {name}", text)
