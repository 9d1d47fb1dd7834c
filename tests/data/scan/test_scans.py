"""What holds for every scan of the table."""

import pytest
from made_scans import make_scan
from pydantic import TypeAdapter, ValidationError

from phalanx.data.build.recipe import RecipeStep
from phalanx.data.rules import RULES
from phalanx.data.scan import SCANS
from phalanx.data.scan.word_stream import ScanSettings

each_scan = pytest.mark.parametrize("kind", SCANS)


@each_scan
def test_a_scan_sets_aside_unless_the_recipe_says_otherwise(kind):
    config = TypeAdapter(RecipeStep).validate_python({"kind": kind})

    assert isinstance(config, ScanSettings)
    assert config.kind == kind
    assert config.outcome == "quarantine"


@each_scan
def test_a_key_that_a_scan_does_not_have_is_refused(kind):
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        TypeAdapter(RecipeStep).validate_python({"kind": kind, "thresold": 1})


@each_scan
def test_a_scan_is_a_rule_of_one_of_the_two_kinds(kind):
    scan = make_scan(SCANS[kind].config())

    assert hasattr(scan, "judge_page") != (hasattr(scan, "mark_page") and hasattr(scan, "decide_outcomes"))


def test_no_scan_has_the_name_of_a_rule():
    assert SCANS.keys() & RULES.keys() == set()


def test_an_unknown_scan_is_refused():
    with pytest.raises(ValidationError, match="does not match any of the expected tags"):
        TypeAdapter(RecipeStep).validate_python({"kind": "poison"})
