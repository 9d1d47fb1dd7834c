"""A build: the same bytes whatever was killed and however many worked, and every byte told of."""

import functools
import gzip
import json
import os
import resource
import shutil

import pytest
from build_recipes import FILES, LINES, fake_steps, read_recipe, tree

from forked_child import run_in_fork
from phalanx.data.build.all_passes import NoProgress
from phalanx.data.build.look import account_entries, find_document, signed_report, verify_account
from phalanx.data.build.preview import preview_build
from phalanx.data.build.recipe import load_recipe
from phalanx.data.build.run import WORK, BuildOptions, build_recipe
from phalanx.data.build.store import WorkStore
from phalanx.data.shards import SealKey, open_dataset
from phalanx.data.shards.lookup import find_document as name_document
from phalanx.errors import DataError, InputError


@pytest.fixture
def steps(monkeypatch):
    """Rules of four kinds in place of those that the recipe names."""
    monkeypatch.setattr("phalanx.data.build.work.make_steps", fake_steps)


@pytest.fixture
def built(tmp_path, steps):
    """A finished dataset with all fates in it."""
    build_recipe(read_recipe(tmp_path), tmp_path / "whole")
    return open_dataset(tmp_path / "whole")


@pytest.mark.parametrize("size_bytes", [100, 1_000, 4_000])
def test_a_full_disk_ends_a_build_with_what_to_do_and_it_goes_on(tmp_path, steps, size_bytes):
    """The disk takes no file of more bytes, which the operating system says at the write, or at the close behind it."""
    recipe = read_recipe(tmp_path)
    build_recipe(recipe, tmp_path / "whole")

    def build_on_full_disk():
        resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, size_bytes))
        with pytest.raises((DataError, InputError), match=r"cannot be written .*(again|another path)"):
            build_recipe(recipe, tmp_path / "full")

    assert run_in_fork(build_on_full_disk) == 0
    build_recipe(recipe, tmp_path / "full")
    assert tree(tmp_path / "full") == tree(tmp_path / "whole")


def test_every_byte_of_every_source_is_kept_or_told_of(built):
    report = signed_report(built)
    lines, again = report["sources"]

    assert lines["read"]["documents"] == FILES * LINES
    assert lines["quarantined"]["suspect"]["documents"] == FILES
    assert lines["dropped"]["twice"]["documents"] == FILES - 1 + FILES - 1 + FILES - 1
    assert lines["dropped"]["length"]["documents"] == 1
    assert lines["dropped"]["empty"]["documents"] == 1
    assert lines["edited"]["quiet"] == {"documents": FILES, "places": FILES, "net_bytes": -5 * FILES}
    ends = [lines["kept"], *lines["dropped"].values(), *lines["quarantined"].values()]
    assert sum(one["raw_bytes"] for one in ends) == lines["read"]["raw_bytes"]
    assert again["kept"]["documents"] == 1
    verify_account(built)


def test_the_manifest_names_terms_steps_versions_and_the_account(built, tmp_path):
    manifest = built.manifest

    assert [(one.name, one.licence) for one in manifest.sources] == [("lines", "CC0"), ("again", "not stated")]
    assert {"account/lines.jsonl.zst", "account/again.jsonl.zst", "report.json", "recipe.toml"} <= set(manifest.files)
    assert manifest.tools["phalanx-train"]
    assert "signer" not in manifest.recipe.content
    assert not (tmp_path / "whole" / WORK).exists()


def test_a_document_that_was_left_out_is_found_with_step_and_value(built):
    (short,) = [line for line in account_entries(built, "lines") if line["step"] == "length"]

    (found,) = [line for line in find_document(built, short["document"]) if line["source"] == "lines"]

    told = [found[name] for name in ("fate", "step", "measure", "value", "limit", "excerpt")]
    assert told == ["dropped", "length", "characters", 5, 20, "short"]


def test_a_released_document_is_let_in_and_one_dropped_by_hand_leaves_the_quarantine(built, tmp_path):
    names = [line["document"] for line in account_entries(built) if line["fate"] == "quarantined"]
    more = f'[quarantine]\nrelease = ["{names[0]}", "no such text"]\ndrop = ["{names[1]}"]'

    end = build_recipe(read_recipe(tmp_path, more=more), tmp_path / "decided")

    source = end.report["sources"][0]
    assert end.report["not_found"] == ["no such text"]
    assert source["quarantined"]["suspect"]["documents"] == FILES - 2
    assert source["dropped"]["suspect"]["documents"] == 1
    assert source["released"]["suspect"]["documents"] == 1
    (kept,) = [one for one in find_document(open_dataset(end.directory), names[0]) if one["fate"] == "kept"]
    assert kept["source"] == "lines"


def test_a_build_of_the_same_is_there_already_and_one_of_something_else_is_refused(built, tmp_path):
    recipe = read_recipe(tmp_path)

    again = build_recipe(recipe, built.directory)

    assert (again.already_existed, again.digest) == (True, built.digest)
    (tmp_path / "texts" / "note.txt").write_text("another text that is long enough to be kept by all of the steps")
    with pytest.raises(InputError, match="another recipe, other files"):
        build_recipe(recipe, built.directory)


def test_the_signature_covers_the_account(built):
    (built.directory / "account" / "lines.jsonl.zst").write_bytes(b"")

    with pytest.raises(DataError, match=r"lines\.jsonl\.zst: altered"):
        list(account_entries(built))


def test_a_rule_that_loses_a_document_is_found_before_a_manifest_is_written(tmp_path, steps, monkeypatch):
    from phalanx.data.build.sift import PieceWriter

    keep = PieceWriter.keep_document
    monkeypatch.setattr(
        PieceWriter, "keep_document", lambda out, document, mark: "line 8" in document.text or keep(out, document, mark)
    )

    with pytest.raises(DataError, match="account of source 'lines': documents do not add up"):
        build_recipe(read_recipe(tmp_path), tmp_path / "lost")

    assert not (tmp_path / "lost" / "dataset.json").exists()


def die_at_write(number):
    """End this process, as a kill would, at one of the moments at which something becomes durable or visible."""
    left = [number]

    def counted(call):
        @functools.wraps(call)
        def wrapped(*args, **kwargs):
            left[0] -= 1
            if left[0] < 0:
                os._exit(9)
            return call(*args, **kwargs)

        return wrapped

    for name in ("fsync", "rename", "replace"):
        setattr(os, name, counted(getattr(os, name)))


def killed_build(recipe, directory, number):
    """Build in a process that dies at a write; return whether it did."""

    def build():
        die_at_write(number)
        build_recipe(recipe, directory)

    code = run_in_fork(build)
    assert code in (0, 9)
    return code == 9


@pytest.mark.parametrize("stride", [pytest.param(31, id="some"), pytest.param(1, id="all", marks=pytest.mark.slow)])
def test_a_build_that_was_killed_at_a_write_goes_on_to_the_same_bytes(tmp_path, steps, built, stride):
    recipe, expected = read_recipe(tmp_path), tree(built.directory)
    number, deaths = 0, 0

    while killed_build(recipe, tmp_path / "killed", number):
        end = build_recipe(recipe, tmp_path / "killed")
        assert tree(end.directory) == expected
        shutil.rmtree(end.directory)
        number, deaths = number + stride, deaths + 1

    assert deaths > 2


def test_finished_pieces_are_not_made_again(tmp_path, steps, built, monkeypatch):
    recipe = read_recipe(tmp_path)
    # far enough that the first pass is over
    assert killed_build(recipe, tmp_path / "killed", 30)
    kept = {path.name for path in (tmp_path / "killed" / WORK).iterdir() if not path.name.startswith(".")}
    made, put = [], WorkStore.store_work
    monkeypatch.setattr(WorkStore, "store_work", lambda store, key, work: made.append(key) or put(store, key, work))

    build_recipe(recipe, tmp_path / "killed")

    assert kept
    assert not kept & set(made)


def test_a_damaged_piece_is_refused_by_name(tmp_path, steps):
    recipe = read_recipe(tmp_path)
    assert killed_build(recipe, tmp_path / "killed", 30)
    for path in (tmp_path / "killed" / WORK).glob("*/documents"):
        path.write_bytes(path.read_bytes()[:-9])

    with pytest.raises(DataError, match="documents: was truncated or altered; delete"):
        build_recipe(recipe, tmp_path / "killed")


def test_an_encrypted_dataset_opens_with_its_key_alone_and_its_account_shows_no_text(tmp_path, steps):
    key = SealKey.create_file(tmp_path / "seal.key")

    end = build_recipe(read_recipe(tmp_path, f'output.key="{tmp_path}/seal.key"'), tmp_path / "sealed")

    with pytest.raises(DataError, match="is encrypted; give the file of its key"):
        open_dataset(end.directory)
    dataset = open_dataset(end.directory, key=key)
    verify_account(dataset)
    assert {line["excerpt"] for line in account_entries(dataset)} == {""}
    assert build_recipe(read_recipe(tmp_path, f'output.key="{tmp_path}/seal.key"'), end.directory).already_existed
    stored = b"".join(path.read_bytes() for path in end.directory.rglob("*") if path.is_file())
    assert b"line 8 word" not in stored


def test_a_preview_finds_what_a_build_finds_in_the_same_documents(built, tmp_path):
    found = preview_build(read_recipe(tmp_path), 1000)

    by_step = {"twice": 15, "length": 1}
    assert found.counts == {
        "kept": built.manifest.documents,
        "dropped by empty": 1,
        **{f"dropped by {step}": count for step, count in by_step.items()},
        "quarantined by suspect": FILES,
    }
    # a preview looks at no file that a build passes over
    account = {line["document"] for line in account_entries(built) if line["step"] != "unsupported"}
    assert {line["document"] for line in found.left_out} == account


def test_a_preview_takes_its_documents_from_files_all_over_a_source(tmp_path, steps):
    found = preview_build(read_recipe(tmp_path), 6)

    files = {row["document"].partition(",")[0] for row in [*found.kept, *found.left_out] if row["source"] == "lines"}
    assert len(files) == 6


def test_a_second_build_in_a_directory_is_refused_and_the_first_one_goes_on(tmp_path, steps, built):
    recipe, out = read_recipe(tmp_path), tmp_path / "twice"
    refusals = []

    class SecondBuild(NoProgress):
        def begin_phase(self, phase, pieces, size_bytes):
            if phase == "read" and not refusals:
                with pytest.raises(InputError, match=r"twice: another build uses it; wait for its end"):
                    build_recipe(recipe, out)
                refusals.append(phase)

    first = build_recipe(recipe, out, BuildOptions(progress=SecondBuild()))

    assert refusals
    assert tree(first.directory) == tree(built.directory)


@pytest.mark.parametrize("content", ["\ufeffa text\r\nof two lines\r\n", "a text\nof two lines\n", " \ra text"])
def test_the_file_of_a_document_names_it_whatever_marks_and_line_ends_it_has(tmp_path, content):
    """Or its owner is told, with a proof, that the text is nowhere in the dataset."""
    (tmp_path / "texts").mkdir()
    for number in range(20):
        (tmp_path / "texts" / f"{number}.txt").write_bytes(f"{content}{number}\r\n".encode())
    path = tmp_path / "recipe.toml"
    path.write_text(
        f'tokenizer = {{ kind = "bpe", vocab_size = 258 }}\n[[sources]]\nkind = "text"\npath = "{tmp_path / "texts"}"\n'
    )
    build_recipe(load_recipe(path), tmp_path / "built")
    dataset = open_dataset(tmp_path / "built")

    found = [name_document(dataset, str(tmp_path / "texts" / f"{number}.txt")).digest for number in range(20)]

    assert len(set(found)) == 20
    assert set(found) == {
        entry.digest
        for group, splits in dataset.groups.items()
        for split in splits
        for entry in dataset.document_entries(group, split)
    }


def test_a_file_that_is_damaged_in_several_places_is_shown_as_any_other(tmp_path):
    """All damage goes by the name of the file, and each place is of another size."""
    (tmp_path / "texts").mkdir()
    for file in range(12):
        members = [
            bytearray(gzip.compress(json.dumps({"text": f"file {file} line {number} " * 8 * number}).encode() + b"\n"))
            for number in range(1, 6)
        ]
        for damaged in (members[1], members[3]):
            damaged[12:20] = b"\xff" * 8
        (tmp_path / "texts" / f"{file:02}.jsonl.gz").write_bytes(b"".join(members))
    path = tmp_path / "recipe.toml"
    path.write_text(
        'tokenizer = { kind = "bpe", vocab_size = 260 }\n[[sources]]\nkind = "jsonl"\n'
        f'path = "{tmp_path}/texts"\n[output]\nsigner = "{tmp_path}/key"\nvalidation_share = 0.3\n'
    )

    (source,) = build_recipe(load_recipe(path), tmp_path / "out").report["sources"]

    assert source["broken"]["damaged"]["documents"] >= 24
    assert len(source["samples"]["damaged"]) == 5
    shown = [sample["document"] for sample in source["samples"]["damaged"]]
    assert len(set(shown)) < len(shown)
