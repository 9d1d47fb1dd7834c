"""Principles are read strictly, and drawn by a public function of seed and place."""

from collections import Counter

import pytest

from phalanx.align import load_constitution
from phalanx.errors import ConfigError, DataError

TWO = """
[[principle]]
name = "short"
critique = "Is it short?"
revise = "Shorten it."
weight = 3.0

[[principle]]
name = "kind"
choose = "Which one is kinder?"
"""


def read(tmp_path, text, name="p.toml"):
    path = tmp_path / name
    path.write_text(text)
    return load_constitution(path)


def test_both_shapes_of_a_file_say_the_same(tmp_path):
    lines = (
        '{"name": "short", "critique": "Is it short?", "revise": "Shorten it.", "weight": 3.0}\n\n'
        '{"name": "kind", "choose": "Which one is kinder?"}\n'
    )

    one, other = read(tmp_path, TWO), read(tmp_path, lines, "p.jsonl")

    assert one.constitution_digest == other.constitution_digest
    assert [each.name for each in one.with_texts("choose").principle] == ["kind"]


def test_a_draw_is_a_function_of_seed_and_place_and_keeps_to_the_weights(tmp_path):
    found = read(tmp_path, TWO)

    drawn = Counter(found.draw_principle(1, place).name for place in range(2000))

    assert found.draw_principle(1, 5, 0) == found.draw_principle(1, 5, 0)
    assert [found.draw_principle(1, n) for n in range(40)] != [found.draw_principle(2, n) for n in range(40)]
    # 3 of 4, four standard deviations
    assert abs(drawn["short"] - 1500) < 80


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "principle: missing; add it"),
        ("principle = []", "at least 1 item"),
        (TWO + "rank = 1\n", "principle.1.rank: unknown key"),
        (TWO.replace("kind", "short"), "'short' appears twice"),
        (TWO.replace('revise = "Shorten it."', ""), "critique and revise belong together"),
        (TWO.replace("Shorten it.", " "), "white space alone"),
        ('[[principle]]\nname = "void"\n', "void: is empty"),
        ('comparison = "{first}?"\n' + TWO, "write {second} where they belong"),
        (TWO.replace("3.0", "0.0"), "greater than 0"),
        ("[[principle", "is not valid TOML"),
    ],
)
def test_a_broken_file_is_refused_with_the_key(tmp_path, text, told):
    with pytest.raises(ConfigError, match=r"p\.toml") as caught:
        read(tmp_path, text)

    assert told in str(caught.value)


def test_a_broken_line_is_refused_with_its_place(tmp_path):
    with pytest.raises(DataError, match="line 2: is not JSON"):
        read(tmp_path, '{"name": "a", "choose": "b"}\n{\n', "p.jsonl")
    with pytest.raises(ConfigError, match=r"principle 1\.choise: .*keys of a principle are name"):
        read(tmp_path, '{"name": "a", "choise": "b"}\n', "p.jsonl")
    with pytest.raises(ConfigError, match="none has critique and revise"):
        read(tmp_path, '{"name": "a", "choose": "b"}\n', "p.jsonl").with_texts("critique", "revise")
    with pytest.raises(ConfigError, match="choices: a"):
        read(tmp_path, '{"name": "a", "choose": "b"}\n', "p.jsonl").with_principle("c")
