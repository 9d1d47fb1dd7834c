"""A document as a person names it: by its digest, by a file with its text, or by its name in the dataset."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from phalanx.data.shards.dataset import Dataset
from phalanx.data.shards.records import document_digest
from phalanx.errors import DataError

_DIGEST = re.compile(r"[0-9a-f]{64}")
_MAX_TEXT_BYTES = 2**30


@dataclass(frozen=True)
class NamedDocument:
    """A document that was asked for."""

    digest: str
    named_by: Literal["digest", "text", "name"]


def find_document(dataset: Dataset, document: str) -> NamedDocument:
    """Find out which document is meant: 64 hex characters are a digest, the path of a file is its text, else a name.

    Raises:
        DataError: The file is no text, or no document has this name, or several that differ have it.
    """
    if _DIGEST.fullmatch(document):
        return NamedDocument(document, "digest")
    path = Path(document)
    if path.is_file():
        text = _read_text_file(path)
        uniform = text.replace("\r\n", "\n").replace("\r", "\n")
        # as it stands, as the step `unicode` leaves it, and as a run takes it, with nothing around it
        digests = [document_digest(form) for form in (text, uniform, uniform.strip())]
        digest_table = dataset.index_table().read_all()["digest"]
        there = (
            digest
            for digest in digests
            if (digest_table == np.frombuffer(bytes.fromhex(digest), np.uint8)).all(axis=1).any()
        )
        return NamedDocument(next(there, digests[0]), "text")
    matches = {
        entry.digest
        for part in dataset.manifest.parts
        for entry in dataset.document_entries(part.group, part.split)
        if entry.name == document
    }
    if len(matches) == 1:
        return NamedDocument(matches.pop(), "name")
    if matches:
        raise DataError(
            f"{document[:200]!r}: {len(matches)} documents have this name; give a digest: {sorted(matches)[:5]}"
        )
    raise DataError(
        f"{document[:200]!r}: is neither a file nor the name of a document of {dataset.directory}; to prove that a "
        "text is absent, give its file or digest"
    )


def _read_text_file(path: Path) -> str:
    try:
        with path.open("rb") as stream:
            content = stream.read(_MAX_TEXT_BYTES + 1)
        if len(content) > _MAX_TEXT_BYTES:
            raise DataError(f"{path}: has more than {_MAX_TEXT_BYTES} bytes; give the digest of the document")
        # a byte-order mark is no part of the text, as for sources
        return content.decode("utf-8-sig")
    except OSError as exc:
        raise DataError(f"{path}: cannot be read ({exc.strerror})") from exc
    except UnicodeDecodeError as exc:
        raise DataError(f"{path}: is not UTF-8 at byte {exc.start}; convert it, or give the digest") from exc
