"""A data source of the user's own: its texts, its place in the cache's key, and what is said when it is wrong."""

import pytest

from phalanx.config import load_config, pin_own_code
from phalanx.config.own_code import open_own_code
from phalanx.data import DataConfig
from phalanx.data.sources import Document, open_source
from phalanx.errors import ConfigError, DataError

GOOD = """
class Chats:
    def __init__(self, times=1):
        self.times = times

    def fingerprint(self):
        return "two chats"

    def documents(self):
        yield from ["hello", "shields up"] * self.times
"""


def source_of(tmp_path, text, options="{}"):
    (tmp_path / "mine.py").write_text(text)
    file = tmp_path / "data.toml"
    file.write_text(
        f'sequence_length = 8\nsources = [{{ kind = "mine.py:Chats", options = {options} }}]\n'
        'tokenizer = { kind = "bpe" }\n'
    )
    config = load_config(file, DataConfig, prepare=pin_own_code).sources[0]
    open_own_code(config.kind, tmp_path)
    return open_source(config)


def test_its_texts_are_documents_with_a_name_for_messages(tmp_path):
    documents = list(source_of(tmp_path, GOOD).documents())

    assert documents == [
        Document("mine.py:Chats, document 1", "hello"),
        Document("mine.py:Chats, document 2", "shields up"),
    ]


def test_the_cache_is_found_by_code_options_and_content(tmp_path):
    first = source_of(tmp_path, GOOD).fingerprint()

    assert source_of(tmp_path, GOOD).fingerprint() == first
    others = [
        source_of(tmp_path, GOOD, "{ times = 2 }"),
        source_of(tmp_path, GOOD + "# changed\n"),
        source_of(tmp_path, GOOD.replace("two chats", "2 chats")),
    ]
    assert len({first, *(other.fingerprint() for other in others)}) == 4


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "class Chats:\n    pass\n",
            r"without documents\(\) and fingerprint\(\); expected a data source",
        ),
        (GOOD.replace("def documents", "def texts"), r"found a Chats without documents\(\)"),
        ("Chats = 3\n", "found a int; expected a class or function that returns a data source"),
        (GOOD.replace('"two chats"', "None"), r"found None from fingerprint\(\)"),
    ],
)
def test_an_object_that_is_no_source_is_told_what_it_lacks(tmp_path, text, said):
    with pytest.raises(ConfigError, match=rf"{said}.*docs/own_code\.md"):
        source_of(tmp_path, text).fingerprint()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (GOOD.replace("self.times = times", "self.times = {}[times]"), "line 4, in __init__.*KeyError: 1"),
        (GOOD.replace('"shields up"]', "1 / 0]"), "line 10, in documents.*ZeroDivisionError"),
        (GOOD.replace('"hello"', "7"), "document 1: found a int, expected a text or a Document"),
    ],
)
def test_code_that_fails_is_shown_without_our_own_lines(tmp_path, text, said):
    with pytest.raises(DataError, match=f"(?s){said}") as refused:
        list(source_of(tmp_path, text).documents())

    assert "sources/own.py" not in str(refused.value)


def test_an_option_that_the_source_has_not_is_named(tmp_path):
    with pytest.raises(DataError, match="unexpected keyword argument 'lines'"):
        source_of(tmp_path, GOOD, "{ lines = 2 }")


def test_another_kind_is_refused_with_the_choices(tmp_path):
    file = tmp_path / "data.toml"
    file.write_text('sequence_length = 8\nsources = [{ kind = "internet" }]\ntokenizer = { kind = "bpe" }\n')

    with pytest.raises(
        ConfigError, match=r"0\.kind: found 'internet'; expected one of 'python_manual', .*'module:object'"
    ):
        load_config(file, DataConfig)
