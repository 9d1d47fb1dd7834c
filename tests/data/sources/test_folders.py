"""Folders as other people hand them over: no link leads out of one, and every file that is not read is told of.

The attacker makes a corpus (an archive that is unpacked, a repository that is cloned) so that another file of the same
machine becomes training text.
"""

import os
import stat
import zipfile
from pathlib import Path

import pytest
from source_records import reasons, records, texts

from phalanx.data.chat.settings import ConversationSource
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
    links_out_of,
    open_source,
)
from phalanx.data.sources.listing import list_files
from phalanx.data.tokenizers.texts import texts_of
from phalanx.errors import DataError

SECRET = "-----BEGIN OPENSSH PRIVATE KEY-----"
KINDS = {
    ".txt": TextConfig,
    ".jsonl": JsonlConfig,
    ".html": HtmlConfig,
    ".eml": MailConfig,
    ".py": CodeConfig,
    ".csv": lambda path: CsvConfig(path=path, template="{text}"),
    ".parquet": ParquetConfig,
    ".epub": EpubConfig,
    ".warc": WarcConfig,
}


@pytest.fixture
def corpus(tmp_path):
    """A folder beside one with a secret."""
    (tmp_path / "home" / ".ssh").mkdir(parents=True)
    for suffix in ("", *KINDS):
        (tmp_path / "home" / ".ssh" / f"id_rsa{suffix}").write_text(SECRET)
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.txt").write_text("An honest text.")
    return folder


def link_to_file(corpus, home):
    (corpus / "b.txt").symlink_to(home / "id_rsa")


def relative_link(corpus, home):
    (corpus / "b.txt").symlink_to(os.path.relpath(home / "id_rsa", corpus))


def link_to_folder(corpus, home):
    (corpus / "b").symlink_to(home)


def link_to_a_link(corpus, home):
    (corpus / "c.txt").symlink_to(home / "id_rsa")
    (corpus / "b.txt").symlink_to("c.txt")


def link_in_a_linked_folder(corpus, home):
    (corpus / ".inside").mkdir()
    (corpus / ".inside" / "b.txt").symlink_to(home / "id_rsa")
    (corpus / "inside").symlink_to(".inside")


def folder_above(corpus, home):
    (corpus / "b").symlink_to("..")


def folder_of_a_like_name(corpus, home):
    (corpus.parent / "corpus2").mkdir()
    (corpus.parent / "corpus2" / "b.txt").write_text(SECRET)
    (corpus / "b").symlink_to("../corpus2")


@pytest.mark.parametrize(
    "plant",
    [
        link_to_file,
        relative_link,
        link_to_folder,
        link_to_a_link,
        link_in_a_linked_folder,
        folder_above,
        folder_of_a_like_name,
    ],
)
def test_no_link_leads_out_of_the_folder_that_the_user_named(corpus, tmp_path, plant):
    plant(corpus, tmp_path / "home" / ".ssh")

    found = records(TextConfig(path=corpus))

    assert texts(found) == ["An honest text."]
    assert any("is a link out of the folder of this source" in reason for reason in reasons(found))
    # a run has no account, so it does not begin
    with pytest.raises(DataError, match="is a link out of the folder of this source, which is not followed"):
        list(open_source(TextConfig(path=corpus)).documents())


@pytest.mark.parametrize("suffix", KINDS)
def test_no_source_of_files_follows_a_link_out_of_its_folder(tmp_path, suffix):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / f"secret{suffix}").write_text(SECRET)
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / f"b{suffix}").symlink_to(tmp_path / "home" / f"secret{suffix}")

    with pytest.raises(DataError, match="is a link out of the folder of this source"):
        open_source(KINDS[suffix](path=tmp_path / "corpus"))


def test_conversations_and_texts_of_a_vocabulary_follow_none_either(corpus, tmp_path):
    (corpus / "b.txt").symlink_to(tmp_path / "home" / ".ssh" / "id_rsa")
    (corpus / "b.jsonl").symlink_to(tmp_path / "home" / ".ssh" / "id_rsa.jsonl")

    with pytest.raises(DataError, match=r"b\.jsonl is a link out of"):
        open_source(DialogueConfig(path=corpus))
    assert [text for _, text in texts_of([corpus])] == ["An honest text."]
    assert [file.name for file in list_files(corpus, (".txt", ".jsonl"))] == ["a.txt"]


def test_a_link_that_the_user_names_and_a_folder_that_the_user_allows_are_followed(corpus, tmp_path):
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "0a1b").write_text("A text in a store.")
    (corpus / "b.txt").symlink_to("../store/0a1b")
    (tmp_path / "named").symlink_to(corpus)

    found = records(TextConfig(path=tmp_path / "named", linked_roots=(tmp_path / "store",)))

    assert texts(found) == ["An honest text.", "A text in a store."]
    assert texts(records(TextConfig(path=corpus / "b.txt"))) == ["A text in a store."]


def test_links_inside_the_folder_are_followed_once(corpus):
    (corpus / "more").mkdir()
    (corpus / "more" / "b.txt").write_text("In a folder.")
    (corpus / "blob").write_text("Without a suffix.")
    (corpus / ".store").mkdir()
    (corpus / ".store" / "c.txt").write_text("In a store.")
    for name, target in {
        "again.txt": "a.txt",
        "more/circle": "../more",
        "d.txt": "blob",
        "e": ".store",
        "f": ".store",
        "self": "self",
        "loop": ".",
    }.items():
        (corpus / name).symlink_to(target)

    found = records(TextConfig(path=corpus))

    assert texts(found) == ["An honest text.", "Without a suffix.", "In a store.", "In a folder."]
    told = {record.name: record.reason for record in found if isinstance(record, BrokenRecord)}
    assert told == {
        ".store/": "is hidden (1 files)",
        "again.txt": "is a link to a.txt, which is read under that name",
        "blob": "is of no kind that this source reads",
        "f": "is a link to e, which is read under that name",
        "loop": "is a link to the folder itself, which is read under that name",
        "more/circle": "is a link to more, which is read under that name",
        "self": "is a link to itself",
    }


def test_a_file_of_two_linked_folders_is_read_once(corpus, tmp_path):
    (tmp_path / "store" / "deep").mkdir(parents=True)
    (tmp_path / "store" / "deep" / "b.txt").write_text("In a store.")
    for name, target in {"b.txt": "store/deep/b.txt", "deep": "store/deep", "whole": "store"}.items():
        (corpus / name).symlink_to(tmp_path / target)

    found = records(TextConfig(path=corpus, linked_roots=(tmp_path / "store",)))

    assert texts(found) == ["An honest text.", "In a store."]
    repeated = "is the same file as b.txt, which is read under that name"
    assert {record.name: record.reason for record in found if isinstance(record, BrokenRecord)} == {
        "deep/b.txt": repeated,
        "whole/deep/b.txt": repeated,
    }


@pytest.fixture
def project(corpus, tmp_path, monkeypatch):
    """The folder that phalanx is started in, with the corpus, a folder beside it, and what is no text of its own."""
    monkeypatch.chdir(tmp_path)
    for name in ("other/b.txt", "keys/owner.key", ".env/c.txt", "other/.hidden.txt", "other/d.txt~"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("In a linked folder." if name == "other/b.txt" else SECRET)
    return tmp_path


@pytest.mark.parametrize(
    ("links", "name", "repeated"),
    [
        ({"b.txt": "other/b.txt"}, "b.txt", []),
        ({"more": "other"}, "more/b.txt", []),
        ({"b.txt": "other/b.txt", "more": "other"}, "b.txt", ["more/b.txt"]),
        ({"b.txt": "c.txt", "c.txt": "other/b.txt"}, "b.txt", ["c.txt"]),
    ],
)
def test_a_link_to_text_of_the_project_is_followed_and_told_of(corpus, project, links, name, repeated):
    for link, target in links.items():
        (corpus / link).symlink_to(target if target == "c.txt" else project / target)
    source = TextConfig(path=Path("corpus"))

    found = records(source)

    assert texts(found) == ["An honest text.", "In a linked folder."]
    told = [record.name for record in found if isinstance(record, BrokenRecord) and "same file" in record.reason]
    told += [record.name for record in found if isinstance(record, BrokenRecord) and "a link to b.txt" in record.reason]
    assert told == repeated
    assert not any(SECRET in text for text in texts(found))
    (line,) = links_out_of([source], "data.sources")
    assert line == (
        f"WARNING: data.sources.0: 1 files are read that lie outside corpus, because links in it lead to them: "
        f"{name} -> other/b.txt; delete the links if you did not make them"
    )


def test_links_of_conversations_out_of_their_folder_are_told_of_too(project):
    (project / "chats").mkdir()
    (project / "other" / "b.jsonl").write_text("{}")
    (project / "chats" / "a.jsonl").symlink_to("../other/b.jsonl")

    assert "a.jsonl -> other/b.jsonl" in links_out_of([ConversationSource(path=Path("chats"))], "data.sources")[0]


@pytest.mark.parametrize(
    ("target", "started_in", "path"),
    [
        ("keys/owner.key", ".", "corpus"),
        (".env/c.txt", ".", "corpus"),
        ("other/.hidden.txt", ".", "corpus"),
        ("other/d.txt~", ".", "corpus"),
        ("home/.ssh/id_rsa.txt", ".", "corpus"),
        ("..", ".", "corpus"),
        (".", ".", "corpus"),
        # a folder that is named from the root, or lies elsewhere, is of no project
        ("other/b.txt", ".", "{project}/corpus"),
        ("other/b.txt", "other", "../corpus"),
        ("other/b.txt", "corpus", "."),
    ],
)
def test_a_link_to_anything_else_of_the_project_is_not_followed(corpus, project, monkeypatch, target, started_in, path):
    monkeypatch.chdir(project / started_in)
    (corpus / "b.txt").symlink_to(project / target)
    source = TextConfig(path=Path(path.format(project=project)))

    found = records(source)

    assert texts(found) == ["An honest text."]
    assert any("is a link out of the folder of this source" in reason for reason in reasons(found))
    assert links_out_of([source], "data.sources") == []


def test_a_home_directory_is_no_project(corpus, project, monkeypatch):
    monkeypatch.setenv("HOME", str(project))
    (corpus / "b.txt").symlink_to(project / "other" / "b.txt")

    assert texts(records(TextConfig(path=Path("corpus")))) == ["An honest text."]


def test_what_systems_and_editors_leave_is_passed_over_and_told_of(corpus):
    left = {
        "._a.txt": "is what macOS leaves beside a file",
        ".hidden.txt": "is hidden",
        "a.txt~": "is what an editor or a download leaves behind",
        "#a.txt#": "is what an editor or a download leaves behind",
        "~$a.txt": "is what an editor or a download leaves behind",
        ".git/": "is hidden (2 files)",
        "__MACOSX/": "is what a system leaves in folders (1 files)",
        "System Volume Information/": "is what a system leaves in folders (1 files)",
        "@eaDir/": "is what a system leaves in folders (1 files)",
        "lost+found/": "is what a system leaves in folders (1 files)",
        "picture.png": "is of no kind that this source reads",
        "dead.txt": "is a link to nothing",
        "pipe.txt": "is no file, but a pipe, socket or device",
    }
    for name in ("._a.txt", ".hidden.txt", "a.txt~", "#a.txt#", "~$a.txt", "picture.png"):
        (corpus / name).write_text("left")
    systems = dict.fromkeys(("__MACOSX", "System Volume Information", "@eaDir", "lost+found"), ("a.txt",))
    for folder, names in {".git": ("a.txt", "b.txt"), **systems}.items():
        (corpus / folder).mkdir()
        for name in names:
            (corpus / folder / name).write_text("left")
    (corpus / "dead.txt").symlink_to("nowhere")
    os.mkfifo(corpus / "pipe.txt")

    found = records(TextConfig(path=corpus))

    assert texts(found) == ["An honest text."]
    told = {record.name: record.reason for record in found if isinstance(record, BrokenRecord)}
    assert told == left
    sizes = {record.name: record.raw_bytes for record in found if isinstance(record, BrokenRecord)}
    assert (sizes[".git/"], sizes["a.txt~"], sizes["dead.txt"]) == (8, 4, 0)


def test_what_is_passed_over_does_not_make_a_corpus_another_one(corpus):
    before = open_source(TextConfig(path=corpus)).fingerprint()

    (corpus / "._a.txt").write_text("left")
    (corpus / "picture.png").write_text("left")

    assert open_source(TextConfig(path=corpus)).fingerprint() == before


@pytest.mark.parametrize(
    ("href", "found"),
    [
        ("../../../../../etc/hostname", "lacks its file"),
        ("/etc/hostname", "lacks its file"),
        ("..%2f..%2f..%2fetc%2fhostname", "lacks its file"),
        # the text of a link, which nobody follows
        ("link.xhtml", "/etc/hostname"),
    ],
)
def test_a_page_of_a_book_is_looked_up_in_the_book_alone(tmp_path, href, found):
    container = '<container><rootfiles><rootfile full-path="book.opf"/></rootfiles></container>'
    item = f'<item id="a" href="{href}" media-type="application/xhtml+xml"/>'
    link = zipfile.ZipInfo("link.xhtml")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(tmp_path / "a.epub", "w") as archive:
        archive.writestr("META-INF/container.xml", container)
        archive.writestr(
            "book.opf", f'<package><manifest>{item}</manifest><spine><itemref idref="a"/></spine></package>'
        )
        archive.writestr(link, "/etc/hostname")

    (record,) = records(EpubConfig(path=tmp_path))

    assert found in (record.reason if isinstance(record, BrokenRecord) else record.text)


def test_a_name_that_is_no_text_is_written_as_its_bytes(corpus):
    (corpus / os.fsdecode(b"\xff.txt")).write_text("Named in Latin-1.")
    (corpus / os.fsdecode(b"caf\xc3\xa9.txt")).write_text("Named in UTF-8.")

    found = records(TextConfig(path=corpus))

    assert [record.name for record in found] == ["\\xff.txt", "a.txt", "caf\u00e9.txt"]
    assert [record.name.encode() for record in records(TextConfig(path=corpus / os.fsdecode(b"\xff.txt")))] == [
        b"\\xff.txt"
    ]
