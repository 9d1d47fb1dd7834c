"""Every error has a code and a page; a code that nothing uses has none."""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import phalanx
from phalanx import errors
from phalanx.cli import run_command
from phalanx.cli.answers.answer import for_programs
from phalanx.cli.explain import error_pages, read_glossary
from phalanx.pipeline.owner.guarantees import GUARANTEES

SOURCE = Path(phalanx.__file__).parent
CODE = re.compile(r"PHX-[A-Z]\d{3}")
LETTERS = {2: "C", 3: "I", 4: "T", 5: "V", 6: "R"}
CLASSES = {name: one for name, one in vars(errors).items() if isinstance(one, type)}
MIXINS = {"ReasonedError"}


def used() -> set[str]:
    files = [*SOURCE.rglob("*.py")]
    return {code for path in files for code in CODE.findall(path.read_text(encoding="utf-8"))}


def told(path: Path) -> Iterator[tuple[str, list[ast.keyword]]]:
    """Yield the class of each error that is given facts, with the facts."""
    text = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)) if ".with_facts" in text else ():
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "with_facts"
            and isinstance(node.func.value, ast.Call)
            and ast.unparse(node.func.value.func) in CLASSES
        ):
            yield ast.unparse(node.func.value.func), node.keywords


@pytest.fixture(scope="module")
def all_told() -> list[tuple[str, list[ast.keyword]]]:
    return [one for path in sorted(SOURCE.rglob("*.py")) for one in told(path)]


def test_every_code_has_a_page_and_every_page_a_use():
    assert set(error_pages()) == used(), "write the page in src/phalanx/cli/answers/error_pages.md, or remove it"


def test_every_section_of_the_page_has_title_cause_look_and_cure():
    text = (SOURCE / "cli" / "answers" / "error_pages.md").read_text(encoding="utf-8")

    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)

    assert headings == sorted(set(headings), key=headings.index)
    assert headings == list(error_pages())


def test_every_class_of_errors_has_a_code_of_its_own_with_the_letter_of_its_exit_code():
    codes = {name: vars(one)["code"] for name, one in CLASSES.items() if name not in MIXINS}

    assert len(set(codes.values())) == len(codes)
    del codes["PhalanxError"]
    wrong = {name: code for name, code in codes.items() if code[4] != LETTERS[CLASSES[name].exit_code]}
    assert wrong == {}


def test_a_narrower_code_has_the_letter_of_its_class(all_told):
    found = [(made, ast.literal_eval(one.value)) for made, facts in all_told for one in facts if one.arg == "code"]

    assert len(found) > 60
    assert [(made, code) for made, code in found if code[4] != LETTERS[CLASSES[made].exit_code]] == []


def test_facts_are_those_that_programs_are_promised(all_told):
    names = {one.arg for _, facts in all_told for one in facts if one.arg is not None}

    assert names == set(errors.FACTS)


def test_facts_are_added_to_those_of_the_class():
    error = errors.ConfigError("wrong")
    assert error.error_facts == {"code": "PHX-C001"}

    same = error.with_facts(code="PHX-C005", key="a.b").with_facts(file="run.toml")

    assert same is error
    assert error.error_facts == {"code": "PHX-C005", "key": "a.b", "file": "run.toml"}
    assert errors.ConfigError("another").error_facts == {"code": "PHX-C001"}


@pytest.mark.parametrize("word", ["PHX-C005", "phx-c005", "C005", "[PHX-C005]"])
def test_explain_prints_the_page_of_a_code(word, capsys):
    assert run_command(["explain", word]) == 0

    said = capsys.readouterr().out
    assert said.startswith("PHX-C005: A key or section that does not exist\n")
    assert all(f"\n{part}: " in said for part in ("Cause", "Cure"))


def test_explain_lists_every_code_when_none_is_given(capsys):
    assert run_command(["explain", "--json"]) == 0

    assert set(json.loads(capsys.readouterr().out)["codes"]) == set(error_pages())
    assert not for_programs()


def test_explain_refuses_what_is_no_code(capsys):
    assert run_command(["explain", "PHX-Z999"]) == 2

    assert "unknown code 'PHX-Z999'" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["shadow", "Shadow", "shadows", "audit log", "audit_log", "Audit-Log", " referee "])
def test_explain_prints_the_line_of_a_term_however_it_is_written(word, capsys):
    assert run_command(["explain", word]) == 0

    said = capsys.readouterr().out
    term = read_glossary()[" ".join(word.lower().replace("_", " ").replace("-", " ").split()).removesuffix("s")]
    assert said.startswith(f"{term.term}: {term.meaning}\n") and term.name in said


@pytest.mark.parametrize(
    "word",
    # what terminal, end table and report say, as it stands there
    [
        *("bit-equal", "owner-shadowed", "gradient_doubted", "nonce", "drift", "in_doubt", "takeovers", "audits"),
        *("false_accusations", "replaced", "guarantees", "epsilon", "rounds", "worse_than_before", "alarms", "preset"),
        *("verdict", "eviction", "rollback", "noise ratio", *GUARANTEES),
    ],
)
def test_every_word_of_the_console_is_in_the_glossary(word, capsys):
    assert run_command(["explain", word]) == 0, capsys.readouterr().err


def test_a_term_as_json_has_its_place_in_the_code(capsys):
    assert run_command(["explain", "shadow", "--json"]) == 0

    told = json.loads(capsys.readouterr().out)
    assert told["term"] == "shadow" and (SOURCE / told["file"]).exists()


@pytest.mark.parametrize(
    ("word", "near"), [("shadw", "shadow"), ("the ledger of rows", "ledger"), ("bitequal", "bit-equal")]
)
def test_a_term_that_is_unknown_lists_near_ones_and_exits_with_2(word, near, capsys):
    assert run_command(["explain", word]) == 2

    error = capsys.readouterr().err
    assert f"unknown term {word!r}; did you mean" in error and near in error


def test_a_word_that_is_like_no_term_is_answered_by_the_list(capsys):
    assert run_command(["explain", "xyzzyq"]) == 2

    assert "`phalanx explain` lists all terms" in capsys.readouterr().err


def test_the_list_has_the_terms_behind_the_codes(capsys):
    assert run_command(["explain"]) == 0

    assert "terms: account, " in capsys.readouterr().out


def test_explain_reads_every_line_of_the_glossary():
    page = (SOURCE.parents[1] / "docs" / "glossary.md").read_text(encoding="utf-8")

    assert len(read_glossary()) == sum(line.startswith("| ") for line in page.splitlines()) - 1


def test_the_code_of_a_message_leads_to_its_page(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run_command(["train", "absent.toml"])
    (code,) = CODE.findall(capsys.readouterr().err)

    assert run_command(["explain", code]) == 0

    assert "cannot be read" in capsys.readouterr().out
