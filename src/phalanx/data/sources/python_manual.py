"""The language reference that CPython carries."""

import hashlib
from collections.abc import Iterator
from pydoc_data.topics import topics

from phalanx.config import canonical_json
from phalanx.data.config import PythonManualConfig
from phalanx.data.sources.source import Document


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
