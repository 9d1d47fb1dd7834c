"""A conversation has one canonical text, and a line that is none is refused or counted."""

import json

import pytest

from phalanx.data.chat import parse_conversation
from phalanx.data.chat.files import ConversationFiles, conversation_from_text, conversation_to_text
from phalanx.data.chat.settings import ConversationSource
from phalanx.errors import DataError

GOOD = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}
UNLEARNABLE = {"messages": [{"role": "user", "content": "hi"}]}


def files_of(tmp_path, lines, broken):
    (tmp_path / "talk.jsonl").write_text("\n".join(lines) + "\n")
    return ConversationFiles(ConversationSource(path=tmp_path / "talk.jsonl"), broken)


def test_the_canonical_text_comes_back_and_is_the_same_for_other_spellings():
    conversation = parse_conversation(GOOD)
    spelled = parse_conversation({"messages": [dict(reversed(message.items())) for message in GOOD["messages"]]})

    assert conversation_from_text(conversation_to_text(conversation)) == conversation
    assert conversation_to_text(spelled) == conversation_to_text(conversation)


def test_broken_lines_are_left_out_and_counted_where_the_run_file_says_so(tmp_path):
    source = files_of(tmp_path, [json.dumps(GOOD), "{", json.dumps(UNLEARNABLE)], "drop")

    assert [document.text for document in source.documents()] == [conversation_to_text(parse_conversation(GOOD))]
    assert [record.name.rpartition(" ")[2] for record in source.dropped] == ["2", "3"]
    # counted anew by each reading
    assert len(list(source.documents())) == 1 and len(source.dropped) == 2


def test_a_conversation_that_is_no_text_says_so(tmp_path):
    half = {"messages": [{"role": "user", "content": "\ud83d"}, GOOD["messages"][-1]]}

    with pytest.raises(DataError, match=r"line 1: holds a lone surrogate, which is not text; repair it$"):
        list(files_of(tmp_path, [json.dumps(half)], "refuse").documents())


def test_otherwise_the_first_broken_line_is_an_error_with_its_place(tmp_path):
    with pytest.raises(DataError, match=r"talk\.jsonl.*2"):
        list(files_of(tmp_path, [json.dumps(GOOD), json.dumps(UNLEARNABLE)], "refuse").documents())
