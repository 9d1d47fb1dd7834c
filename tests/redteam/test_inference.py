"""Values of single records and properties of all of them: told by a model that leaks, and at chance by another one."""

import gzip
from dataclasses import replace

import pytest

from phalanx.errors import DataError
from phalanx.redteam.finding import Score
from phalanx.redteam.inference import AttributeInference, PropertyInference
from phalanx.redteam.opening import TargetChoice, open_target
from phalanx.redteam.table import ATTACKS_ON_MODELS


def is_at_chance(score: Score) -> bool:
    return score.interval[0] <= score.chance <= score.interval[1]


def test_a_value_of_a_record_known_by_heart_is_told(undefended):
    finding = AttributeInference().run(undefended)

    assert finding.outcome == "found"
    assert finding.score.value >= 0.95
    assert finding.details["named_first"] >= 0.8
    assert finding.details["strangers_auc"] < 0.7
    assert any(character.isdigit() for character in finding.examples[0])


def test_a_model_that_never_saw_the_records_tells_no_value(defended):
    finding = AttributeInference().run(defended)

    assert finding.outcome == "not found"
    assert is_at_chance(finding.score)
    assert finding.examples == ()


@pytest.mark.slow
def test_what_every_model_would_guess_is_no_leak(undefended):
    """Members and strangers that are told equally well: the attacker knows language, and no record."""
    finding = AttributeInference().run(replace(undefended, strangers=undefended.members))

    assert finding.score.value >= 0.95
    assert finding.outcome == "not found"


def test_an_attribute_that_a_text_names_is_asked_for(undefended):
    people = ("Anna", "Boris", "Clara", "David", "Elena", "Frank", "Greta", "Hugo", "Irma", "Jonas", "Karla", "Leon")
    sides = {}
    for name in ("members", "strangers"):
        texts = getattr(undefended, name)
        named = [next((p for p in people if undefended.decode(row).startswith(p)), "") for row in texts.rows]
        sides[name] = replace(texts, attributes=tuple(named))

    finding = AttributeInference().run(replace(undefended, **sides))

    assert finding.outcome == "found"
    assert finding.examples[0].split(" ")[0] in people


def test_texts_without_values_are_not_judged(undefended):
    bare = replace(undefended.members, rows=tuple(row[:4] for row in undefended.members.rows), attributes=())

    finding = AttributeInference().run(replace(undefended, members=bare))

    assert finding.outcome == "not judged"
    assert "fewer than 8" in finding.why_not


@pytest.mark.slow
def test_what_is_common_in_the_training_data_is_told(skewed):
    finding = PropertyInference().run(skewed)

    assert finding.outcome == "found"
    assert finding.score.value >= 0.75
    assert finding.examples


@pytest.mark.slow
def test_a_model_of_other_data_tells_no_property(balanced):
    finding = PropertyInference().run(balanced)

    assert finding.outcome == "not found"
    assert is_at_chance(finding.score)
    assert finding.examples == ()


def test_data_like_all_others_have_no_property_to_tell(undefended):
    finding = PropertyInference().run(replace(undefended, members=replace(undefended.strangers)))

    assert finding.outcome == "not judged"
    assert "hardly a token" in finding.why_not


def test_a_file_names_the_attribute_of_each_text(undefended, tmp_path):
    file = tmp_path / "members.jsonl"
    file.write_text('{"text": "Anna hid a map in Oslo at dawn.", "attribute": "Oslo"}\n' * 2)

    with open_target(TargetChoice(str(undefended.directory), members=file)) as target:
        assert target.members.attributes == ("Oslo", "Oslo")
        assert target.strangers.attributes == ()


def test_a_packed_file_is_no_list_of_texts(undefended, tmp_path):
    file = tmp_path / "members.txt.gz"
    file.write_bytes(gzip.compress(b"Anna hid a map in Oslo at dawn.\n" * 9))

    with (
        pytest.raises(DataError, match="is not utf-8; convert"),
        open_target(TargetChoice(str(undefended.directory), members=file)),
    ):
        pass


def test_both_attacks_are_in_the_table_with_a_control():
    entries = [ATTACKS_ON_MODELS[name] for name in ("attribute_inference", "property_inference")]

    assert [entry.control for entry in entries] == ["text", "skewed"]
    assert not any(entry.is_slow for entry in entries)
