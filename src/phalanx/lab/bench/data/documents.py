"""Real documents to measure rules on: what CPython carries, Debian's documentation, and the data files of tasks."""

import gzip
import hashlib
import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

from phalanx.data.sources import SOURCES, Document
from phalanx.data.tasks.task import find_file
from phalanx.errors import DataError

_DEBIAN = ("python3.11", "postgresql-doc-15", "debian-handbook")
_LARGEST = 300_000
"""Characters: a few pages are longer than all others together, and a figure should not be theirs."""


def real_documents(size_bytes: int) -> tuple[list[Document], dict[str, int]]:
    """Draw documents of every kind that is here, the same ones every time.

    Returns:
        Documents with at least `size_bytes` of UTF-8 together, and the bytes of each kind.
    """
    ranked: list[tuple[bytes, str, Document]] = []
    for kind, read in _KINDS.items():
        for document in read():
            if document.text.strip() and len(document.text) <= _LARGEST:
                # in the order of digests: a draw that no list of files changes
                ranked.append((hashlib.sha256(f"{kind} {document.name}".encode()).digest(), kind, document))
    documents: list[Document] = []
    sizes = dict.fromkeys(_KINDS, 0)
    for _, kind, document in sorted(ranked, key=lambda one: one[0]):
        documents.append(document)
        sizes[kind] += len(document.text.encode("utf-8", "replace"))
        if sum(sizes.values()) >= size_bytes:
            return documents, sizes
    raise DataError(
        f"bench data: {sum(sizes.values())} bytes of real documents here, {size_bytes} wanted; install python3.11-doc, "
        "postgresql-doc-15 and debian-handbook, or set PHALANX_DATA to the data files of the tasks"
    )


def _python_documents() -> Iterator[Document]:
    for kind in ("python_manual", "python_docstrings"):
        yield from SOURCES[kind].open(SOURCES[kind].config(kind=kind)).documents()


def debian_pages(text_bytes: int) -> list[Path] | None:
    """Draw pages with so many bytes of text, the same ones every time; None where there are not so many."""
    files, size = list[Path](), 0
    drawn = sorted(_debian_documents(), key=lambda one: hashlib.sha256(one.name.encode()).digest())
    for document in drawn:
        package, _, path = document.name.partition("/")
        if len(document.text) <= _LARGEST:
            files.append(_package_docs(package) / path)
            size += len(document.text.encode("utf-8", "replace"))
        if size >= text_bytes:
            return files
    return None


def _package_docs(package: str) -> Path:
    return Path("/usr/share/doc") / package / "html"


def _debian_documents() -> Iterator[Document]:
    extract = importlib.import_module("resiliparse.extract.html2text").extract_plain_text
    for package in _DEBIAN:
        home = _package_docs(package)
        for path in sorted(home.rglob("*.html")):
            page = path.read_text(encoding="utf-8", errors="replace")
            yield Document(f"{package}/{path.relative_to(home)}", extract(page, main_content=True))


def _medical_documents() -> Iterator[Document]:
    try:
        path = find_file(None, "medquad.jsonl.gz", "")
    except DataError:
        return
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for number, row in enumerate(file):
            record = json.loads(row)
            yield Document(f"medquad {number}", f"{record['q']}\n\n{record['a']}")


_KINDS: dict[str, Callable[[], Iterator[Document]]] = {
    "python": _python_documents,
    "debian_documentation": _debian_documents,
    "medquad": _medical_documents,
}
