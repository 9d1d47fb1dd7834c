"""Calls are told from text by the marks of the model's template, however the text is cut."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.serve import TextModel
from phalanx.serve.engine import ToolReader
from phalanx.serve.engine.tools import ToolFormat, find_tool_format
from tiny_served import TEMPLATE, write_model

FORMAT = ToolFormat("<tool_call>", "</tool_call>")
CALL = '<tool_call>\n{"name": "add", "arguments": {"n": 1}}\n</tool_call>'


def read(text, cuts=(), names=("add",)):
    reader = ToolReader(FORMAT, frozenset(names))
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    plain, calls = "", []
    for start, stop in itertools.pairwise(places):
        more, found = reader.feed_text(text[start:stop])
        plain, calls = plain + more, calls + found
    rest, last = reader.close()
    return plain + rest, [(call.name, call.arguments) for call in calls + last]


@given(st.lists(st.integers(0, 200), max_size=12))
def test_calls_are_read_however_the_text_is_cut(cuts):
    assert read(f"so {CALL} and {CALL}!", cuts) == ("so  and !", [("add", {"n": 1})] * 2)


@given(st.text(alphabet="<tol_ca>/{}x", max_size=40), st.lists(st.integers(0, 40), max_size=5))
def test_what_is_no_call_stays_text(text, cuts):
    plain, calls = read(text, cuts)

    assert calls == []
    if "<tool_call>" not in text:
        assert plain == text


@pytest.mark.parametrize(
    "inside",
    [
        "no JSON",
        "[1]",
        '{"name": "drop", "arguments": {}}',
        '{"name": 1, "arguments": {}}',
        '{"name": "add", "arguments": [1]}',
        "[" * 100_000,
    ],
)
def test_a_broken_call_stays_visible(inside):
    plain, calls = read(f"<tool_call>{inside}</tool_call>")

    assert calls == []
    assert inside in plain


def test_a_call_without_its_closing_mark_counts_where_it_is_whole():
    assert read(CALL.removesuffix("</tool_call>")) == ("", [("add", {"n": 1})])


def test_ids_of_calls_differ():
    reader = ToolReader(FORMAT, frozenset({"add"}))

    _, calls = reader.feed_text(CALL + CALL)

    assert len({call.id for call in calls}) == 2


def with_template(tmp_path, template):
    directory = write_model(tmp_path)
    (directory / "chat_template.jinja").write_text(template)
    return TextModel(directory)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (TEMPLATE, FORMAT),
        (
            TEMPLATE.replace("<tool_call>", "<function>").replace("</tool_call>", "</function>"),
            ToolFormat("<function>", "</function>"),
        ),
        (
            TEMPLATE.replace('"arguments": {{', '"parameters": {{'),
            ToolFormat("<tool_call>", "</tool_call>", "parameters"),
        ),
        (TEMPLATE.replace("{{ tool | tojson }}", "a tool"), None),
        ("{% for m in messages %}{{ m['content'] or '' }}{% endfor %}", None),
        ("{{ raise_exception('no') }}", None),
    ],
)
def test_the_form_of_calls_is_the_templates(tmp_path, template, expected):
    assert find_tool_format(with_template(tmp_path, template)) == expected


def test_a_grammar_names_every_tool():
    source = FORMAT.grammar_of(()).source

    assert json.dumps("<tool_call>") in source
