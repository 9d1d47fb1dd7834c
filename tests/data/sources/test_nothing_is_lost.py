"""The account is complete: every byte of every file below a source is in a document, a drop or a named file."""

import gzip
import importlib
import io
import json
import random
import shutil
import zipfile

import pytest
from source_records import raw_bytes

from phalanx.data.sources import (
    SOURCES as TABLE,
)
from phalanx.data.sources import (
    BrokenRecord,
    CodeConfig,
    CsvConfig,
    DialogueConfig,
    EpubConfig,
    HtmlConfig,
    JsonlConfig,
    MailConfig,
    ParquetConfig,
    TextConfig,
    WarcConfig,
    open_source,
)
from phalanx.data.sources.listing import leftover_reason
from phalanx.errors import DataError

pytest.importorskip("resiliparse")
pytest.importorskip("fastwarc")
pa = pytest.importorskip("pyarrow")
zstandard = pytest.importorskip("zstandard")

TREES, MANY_TREES = 100, 1000
WITHOUT_FILES = {"canaries", "python_manual", "python_docstrings"}
"""Sources that read what Python itself carries, or make their texts."""


def _book():
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("META-INF/container.xml", '<c><rootfile full-path="a.opf"/></c>')
        archive.writestr("a.opf", '<p><item id="a" href="a.html" media-type="text/html"/><itemref idref="a"/></p>')
        archive.writestr("a.html", "<p>A page.</p>")
    return stream.getvalue()


def _table():
    stream = io.BytesIO()
    rows = pa.table({"text": ["A row.", None, "caf\u00e9"] * 5})
    importlib.import_module("pyarrow.parquet").write_table(rows, stream, row_group_size=4)
    return stream.getvalue()


HTTP = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n<p>A page of words.</p>"
WARC = b"WARC/1.0\r\nWARC-Type: response\r\nContent-Type: application/http\r\nContent-Length: %d\r\n\r\n%s\r\n\r\n"
SOURCES = {
    "text": (lambda path: TextConfig(path=path), ".txt", "caf\u00e9\n".encode()),
    "parts": (lambda path: TextConfig(path=path, delimiter="--"), ".md", b"one--two--three"),
    "jsonl": (lambda path: JsonlConfig(path=path), ".jsonl", b'{"text": "a"}\n\n{"text": "caf\xc3\xa9"}\n'),
    "html": (lambda path: HtmlConfig(path=path), ".html", b"<meta charset=utf-8><p>caf\xc3\xa9 and more.</p>"),
    "csv": (lambda path: CsvConfig(path=path, template="{text}"), ".csv", b'text,n\r\n"a\nb",1\r\nc,2\r\n'),
    "mail": (lambda path: MailConfig(path=path), ".mbox", b"From a\nSubject: x\n\nhi\n\nFrom b\nSubject: y\n\nho\n"),
    "dialogue": (
        lambda path: DialogueConfig(path=path),
        ".jsonl",
        json.dumps({"messages": [{"role": "user", "content": "a"}]}).encode() + b"\n",
    ),
    "code": (lambda path: CodeConfig(path=path), ".py", b"print('caf\xc3\xa9')\n"),
    "warc": (lambda path: WarcConfig(path=path), ".warc", 2 * (WARC % (len(HTTP), HTTP))),
    "epub": (lambda path: EpubConfig(path=path), ".epub", _book()),
    "parquet": (lambda path: ParquetConfig(path=path), ".parquet", _table()),
}
NAMES = [
    "a{}",
    "sub/d{}",
    "sub/sub/e{}",
    "._f{}",
    ".g{}",
    "h{}~",
    "i.png",
    ".git/j{}",
    "__MACOSX/k{}",
    "l{}.bak",
    "M{}",
    "n{}.xz",
    "Thumbs.db",
    "~$o{}",
    "#p{}#",
    "sub/.q/r{}",
    "s t\u00e9{}",
    "a\u0301\n{}",
]
PACKERS = {
    ".gz": (gzip.compress, lambda whole: gzip.compress(b"") + gzip.compress(whole) + bytes(9)),
    ".zst": (zstandard.compress, lambda whole: zstandard.compress(whole) + b"\x50\x2a\x4d\x18\x04\0\0\0skip"),
}
"""One member or frame, and what else one file may be."""


def damaged(content, draw):
    """The content as it is, or with bytes changed, cut out, doubled or put in."""
    changed = bytearray(content)
    for _ in range(draw.choice((0, 0, 1, 3))):
        at = draw.randrange(len(changed) + 1)
        act = draw.randrange(4)
        if act == 0 and at < len(changed):
            changed[at] ^= 1 << draw.randrange(8)
        elif act == 1:
            del changed[at : at + draw.choice((1, 8, 64))]
        elif act == 2:
            changed[at:at] = changed[: draw.choice((1, 8, 64))]
        else:
            changed[at:at] = draw.choice((b"\0", b"\xff\xfe", b'"', b"\n\n", b"<", b"From ", b"\x1b]0;x\x07"))
    return bytes(changed)


def tree(home, suffix, content, draw):
    """Make a folder of files, folders and links.

    Returns:
        The sizes of its files, unpacked, by name; those of links are 0, those of packed files that are cut are -1.
    """
    sizes = {}
    for pattern in draw.sample(NAMES, draw.randint(1, 6)):
        name = pattern.format(suffix)
        stored = whole = damaged(content, draw)
        size = len(whole)
        if name.endswith(suffix) and draw.randrange(4) == 0:
            packed = draw.choice(tuple(PACKERS))
            name, (plain, other) = f"{name}{packed}", PACKERS[packed]
            if draw.randrange(4) == 0:
                # how much of it can be unpacked is not known here
                stored, size = plain(whole), -1
                stored = draw.choice((stored[: draw.randrange(1, len(stored))], stored + b"more"))
            else:
                stored = draw.choice((plain, other))(whole)
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_bytes(stored)
        sizes[name] = size
    for number in range(draw.choice((0, 0, 1, 2))):
        target = draw.choice(("nowhere", "/etc/hostname", ".", *sizes))
        (home / f"link{number}{suffix}").symlink_to(target)
        sizes[f"link{number}{suffix}"] = 0
    return sizes


def account(kind, home, draw):
    """Check one generated tree of a kind.

    Returns:
        Files and links of the tree, files that its source lists, and the bytes in their records.
    """
    config, suffix, content = SOURCES[kind]
    home.mkdir()
    sizes = tree(home, suffix, content, draw)
    try:
        source = open_source(config(home))
    except DataError as exc:
        assert "no file of this source's kind" in str(exc)
        return len(sizes), 0, 0
    passed_over = {file.name for file in source.files if file.passed_over}
    found = {file.name: list(source.read_file_records(file)) for file in source.files}
    for name, size in sizes.items():
        parts = name.split("/")
        above = [f"{'/'.join(parts[: at + 1])}/" for at in range(len(parts) - 1) if leftover_reason(parts[at])]
        told = found.get(above[0] if above else name, [])
        # a file without a byte may have no record
        assert told or not size, (name, sorted(found))
        if not above and not (home / name).is_symlink():
            on_disk = (home / name).stat().st_size
            if name in passed_over:
                assert sum(map(raw_bytes, told)) == on_disk
            elif size < 0:
                assert any(isinstance(record, BrokenRecord) for record in told), name
            elif kind != "parquet":
                # rows of a table have no bytes of their own in a file
                assert sum(map(raw_bytes, told)) == size
            elif (home / name).read_bytes() == content:
                assert len(told) == 15
    for record in (record for records in found.values() for record in records if isinstance(record, BrokenRecord)):
        assert record.reason.isascii()
        assert record.reason.isprintable()
        assert record.reason
    return len(sizes), len(found), sum(raw_bytes(record) for records in found.values() for record in records)


def assert_most_trees_are_read(counts):
    """Tell that the trees were no empty ones, in which every byte is easily accounted for."""
    read = [(num_files, num_bytes) for _, num_files, num_bytes in counts if num_files]
    assert len(read) > len(counts) / 2
    assert sum(num_files for num_files, _ in read) > len(read)
    assert sum(num_bytes for _, num_bytes in read) > 0


@pytest.mark.parametrize("kind", SOURCES)
def test_every_byte_of_a_hundred_trees_of_each_kind_is_told_of(tmp_path, kind):
    counts = [account(kind, tmp_path / str(number), random.Random(f"{kind} {number}")) for number in range(TREES)]

    assert_most_trees_are_read(counts)


@pytest.mark.slow
@pytest.mark.parametrize("kind", SOURCES)
def test_every_byte_of_a_thousand_trees_of_each_kind_is_told_of(tmp_path, kind):
    counts = []
    for number in range(TREES, MANY_TREES):
        counts.append(account(kind, tmp_path / str(number), random.Random(f"{kind} {number}")))
        shutil.rmtree(tmp_path / str(number))

    assert_most_trees_are_read(counts)


def test_every_source_of_files_is_tried(tmp_path):
    tried = {config(tmp_path).kind for config, _, _ in SOURCES.values()}

    assert tried == set(TABLE) - WITHOUT_FILES
