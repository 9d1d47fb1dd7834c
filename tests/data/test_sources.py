"""Each source gives the same documents in the same order, or an error that says where."""

import gzip
import importlib
import json

import pytest

from phalanx.data import PythonDocstringsConfig, PythonManualConfig
from phalanx.data.sources import SOURCES, HtmlConfig, JsonlConfig, TextConfig, open_source
from phalanx.data.sources.python_docstrings import PythonDocstrings
from phalanx.errors import DataError


def texts(config):
    return [document.text for document in open_source(config).documents()]


def test_the_manual_has_one_document_per_topic():
    source = open_source(PythonManualConfig())

    documents = list(source.documents())

    assert len(documents) > 70
    assert 400_000 < sum(len(document.text.encode()) for document in documents) < 600_000
    assert [document.name for document in documents] == sorted(document.name for document in documents)
    assert source.fingerprint() == open_source(PythonManualConfig()).fingerprint()


def test_docstrings_are_read_without_importing_the_module(tmp_path):
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text('"""A package."""\nraise SystemExit("imported")\n')
    (tmp_path / "pkg" / "inner.py").write_text(
        'class A:\n    """A class."""\n    if True:\n        def f(self):\n            r"""A \\method."""\n'
        'def g():\n    "\\d is an invalid escape, which only warns."\n'
    )
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "broken.py").write_text("def (")

    documents = list(PythonDocstrings(PythonDocstringsConfig(), tmp_path).documents())

    assert [document.name for document in documents] == ["docstrings of pkg", "docstrings of pkg.inner"]
    assert documents[0].text == "pkg\nA package."
    assert documents[1].text == (
        "pkg.inner.A\nA class.\n\npkg.inner.A.f\nA \\method.\n\n"
        "pkg.inner.g\n\\d is an invalid escape, which only warns."
    )


def test_the_real_library_begins_with_its_first_modules():
    documents = open_source(PythonDocstringsConfig()).documents()

    first = [next(documents) for _ in range(12)]

    assert any("__future__" in document.name for document in first)
    assert sum(len(document.text) for document in first) > 2_000


def test_a_module_that_cannot_be_parsed_is_named(tmp_path):
    (tmp_path / "broken.py").write_text("def (")

    with pytest.raises(DataError, match=r"broken\.py: cannot be parsed"):
        list(PythonDocstrings(PythonDocstringsConfig(), tmp_path).documents())


def test_a_library_without_sources_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"has no \.py files"):
        PythonDocstrings(PythonDocstringsConfig(), tmp_path)


def test_text_files_are_read_by_name_and_unpacked(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.md").write_text("second")
    (tmp_path / "a.txt").write_bytes("\ufefffirst \u00e9".encode())
    (tmp_path / "sub" / "c.txt.gz").write_bytes(gzip.compress(b"third"))
    (tmp_path / "ignored.csv").write_text("no")

    assert texts(TextConfig(path=tmp_path)) == ["first \u00e9", "second", "third"]


def test_a_delimiter_cuts_a_text_file_into_documents(tmp_path):
    path = tmp_path / "all.text"
    path.write_text("one\n---\ntwo\n---\nthree")

    assert texts(TextConfig(path=path, delimiter="\n---\n")) == ["one", "two", "three"]


def test_json_lines_give_the_named_field(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    lines = [json.dumps({"body": "one\nline"}), "", json.dumps({"body": "two", "other": 1})]
    path.write_bytes(gzip.compress("\r\n".join(lines).encode()))

    assert texts(JsonlConfig(path=path, field="body")) == ["one\nline", "two"]


def test_pages_lose_their_markup(tmp_path):
    pytest.importorskip("resiliparse")
    page = "<html><head><title>x</title><script>var no;</script></head><body><nav>menu</nav>"
    (tmp_path / "a.html").write_text(f"{page}<main><h1>Shields</h1><p>Hold the caf\u00e9.</p></main></body></html>")

    (text,) = texts(HtmlConfig(path=tmp_path))

    assert "Shields" in text
    assert "Hold the caf\u00e9." in text
    assert "var no" not in text
    assert "menu" not in text


def test_pages_without_the_extra_name_it(tmp_path, monkeypatch):
    (tmp_path / "a.html").write_text("<p>x</p>")

    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)

    with pytest.raises(DataError, match=r"install phalanx-train\[html\]"):
        open_source(HtmlConfig(path=tmp_path))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"{", "line 2: is not JSON"),
        (b"[" * 100_000, "line 2: is not JSON"),
        (b"[1]", "line 2: found a JSON list, expected an object"),
        (b'{"txt": "x"}', "line 2: no field 'text'; its fields are: txt; set `field` to the text field"),
        (b"{}", "line 2: no field 'text'; its fields are: none"),
        (b'{"text": 5}', "line 2: field 'text' holds a JSON int, expected text$"),
        (
            b'{"text": [{"role": "user"}]}',
            "line 2: field 'text' holds a JSON list, expected text; use kind",
        ),
        (b'{"text": "\xff"}', r"line 2: byte 10 \(0xff\) is not utf-8"),
    ],
)
def test_a_malformed_line_is_named(tmp_path, line, said):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"text": "fine"}\n' + line + b"\n")

    with pytest.raises(DataError, match=said):
        texts(JsonlConfig(path=path))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", b"ok \xe9", r"a\.txt: byte 3 \(0xe9\) is not utf-8; convert"),
        ("a.txt.gz", b"no gzip", r"a\.txt\.gz: cannot be read"),
        ("a.txt.gz", gzip.compress(b"x" * 9999, mtime=0)[:-9], r"a\.txt\.gz: cannot be read"),
    ],
)
def test_a_damaged_text_file_is_named(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)

    with pytest.raises(DataError, match=said):
        texts(TextConfig(path=tmp_path))


def test_an_unknown_page_encoding_is_refused(tmp_path):
    pytest.importorskip("resiliparse")
    (tmp_path / "a.html").write_text("<p>x</p>")

    with pytest.raises(DataError, match="unknown encoding 'klingon'"):
        texts(HtmlConfig(path=tmp_path, encoding="klingon"))


@pytest.mark.parametrize("kind", [TextConfig, JsonlConfig, HtmlConfig])
def test_a_path_with_nothing_of_the_kind_is_refused(tmp_path, kind):
    (tmp_path / "a.csv").write_text("x")

    with pytest.raises(DataError, match="no file of this source's kind found"):
        open_source(kind(path=tmp_path))
    with pytest.raises(DataError, match="not found"):
        open_source(kind(path=tmp_path / "missing"))


def test_a_fingerprint_follows_content_names_and_options(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one")
    before = open_source(TextConfig(path=tmp_path)).fingerprint()

    with_option = open_source(TextConfig(path=tmp_path, delimiter="n")).fingerprint()
    path.write_text("two")
    changed = open_source(TextConfig(path=tmp_path)).fingerprint()
    path.write_text("one")
    path.rename(tmp_path / "b.txt")
    renamed = open_source(TextConfig(path=tmp_path)).fingerprint()

    assert len({before, with_option, changed, renamed}) == 4


def test_the_table_of_sources_is_the_list_of_kinds():
    assert sorted(SOURCES) == [
        "canaries",
        "code",
        "csv",
        "dialogue",
        "epub",
        "html",
        "jsonl",
        "mail",
        "parquet",
        "python_docstrings",
        "python_manual",
        "text",
        "warc",
    ]
