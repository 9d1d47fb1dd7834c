"""A model family of the user's own: cut as the families of the package are, and told what it lacks."""

import pytest
import torch

from phalanx.config import open_own_code
from phalanx.config.own_code import pin_reference
from phalanx.errors import ConfigError, ModelError
from phalanx.models import FAMILIES, ModelConfig, StageSpec, adopt_family, build_stage, open_model
from phalanx.models.families import ADOPTED
from phalanx.planner import shape_of
from phalanx.planner.model.families import FAMILIES as FACTS

CWM = {
    "model_type": "cwm",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "max_position_embeddings": 32,
    "sliding_window": 4,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
PLANNED = """
from phalanx.planner.model.families import SlicingRule
from phalanx.planner.model.families.planned import PlannedFamily

cwm = PlannedFamily(SlicingRule(windows="layers"), defaults={"head_dim": 128})
"""
WRITTEN = """
from phalanx.models.written.decoders import Llama
from phalanx.planner.model.families.planned import LLAMA


class Arcee(Llama):
    model_type = "cwm"
    facts = LLAMA
"""


@pytest.fixture(autouse=True)
def tables_as_before():
    """What a test adopts is gone after it."""
    yield
    for name in ADOPTED:
        del FAMILIES[name], FACTS[name]
    ADOPTED.clear()


def adopted(tmp_path, text, name):
    (tmp_path / "mine.py").write_text(text)
    kind = pin_reference(f"mine.py:{name}", tmp_path)
    open_own_code(kind, tmp_path)
    return adopt_family(kind)


def test_a_family_by_transformers_plan_is_cut_and_planned(tmp_path):
    with pytest.raises(ModelError, match="'cwm'; expected one of"):
        shape_of(CWM)

    assert adopted(tmp_path, PLANNED, "cwm").model_type == "cwm"

    source = open_model(ModelConfig(from_scratch=True, architecture=CWM), tmp_path, seed=1)
    parts = [
        build_stage(source, spec, adapter=None, activation_checkpointing=False, attention="sdpa", seed=1)
        for spec in (StageSpec(0, 1, 0, 2), StageSpec(0, 2, 0, 1), StageSpec(1, 2, 1, 2))
    ]
    whole, first, last = parts
    ids = torch.arange(8).view(1, 8)
    assert torch.equal(last(first(ids)), whole(ids))
    assert shape_of(CWM).num_parameters == sum(weight.numel() for weight in whole.parameters())


def test_a_class_with_facts_of_its_own_is_a_family(tmp_path):
    family = adopted(tmp_path, WRITTEN, "Arcee")

    assert (FAMILIES["cwm"], FACTS["cwm"]) == (family, family.facts)


def test_a_changed_file_takes_the_place_of_the_one_before(tmp_path):
    before = adopted(tmp_path, WRITTEN, "Arcee")

    after = adopted(tmp_path, WRITTEN + "# changed\n", "Arcee")

    assert FAMILIES["cwm"] is after
    assert type(after) is not type(before)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Arcee = 3\n", "found a int; expected a PlannedFamily that is called as its model_type, or a class"),
        (WRITTEN.replace("    facts = LLAMA\n", ""), "found a family without facts"),
        (
            WRITTEN.replace('"cwm"', '"llama"'),
            "found a family for model_type 'llama'; expected one for",
        ),
        (
            "from phalanx.models.family import Family\n\n\nclass Arcee(Family):\n"
            "    model_type = prefix = trunk = facts = 'x'\n",
            "abstract class Arcee with abstract methods? blocks, context",
        ),
        (WRITTEN + "\n    def __init__(self):\n        1 / 0\n", "line 11, in __init__.*ZeroDivisionError"),
    ],
)
def test_an_object_that_is_no_family_is_told_what_it_lacks(tmp_path, text, said):
    with pytest.raises(ConfigError, match=f"(?s){said}"):
        adopted(tmp_path, text, "Arcee")

    assert not ADOPTED
    assert FAMILIES["llama"].model_type == "llama"


def test_a_family_that_was_not_loaded_is_not_adopted(tmp_path):
    (tmp_path / "mine.py").write_text(PLANNED + "# never loaded\n")

    with pytest.raises(ConfigError, match="code that this process has not loaded"):
        adopt_family(pin_reference("mine.py:cwm", tmp_path))
