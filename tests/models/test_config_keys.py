"""The keys of a family's config, read from transformers' source without its import, are those of its class."""

import dataclasses

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from phalanx.errors import ModelError
from phalanx.models.config_keys import OLD_KEYS, check_keys, config_keys
from phalanx.models.families import FAMILIES as CODE
from phalanx.planner.model.families import FAMILIES

NOT_UNDERSTOOD = {"gemma3_text"}
"""Its class lies in another family's file."""


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_keys_that_are_read_are_those_of_the_class(family):
    found, config = config_keys(family), CONFIG_MAPPING[family]

    if family in NOT_UNDERSTOOD:
        assert found is None
        return
    assert found == {*(field.name for field in dataclasses.fields(config)), "model_type", *config.attribute_map}


def test_an_unknown_key_is_refused_by_name_and_an_older_one_is_taken():
    check_keys({"model_type": "gpt2", "n_layer": 3, "num_hidden_layers": 3, OLD_KEYS[0]: 1.0}, "here")

    with pytest.raises(ModelError, match=r"here: unknown key 'n_layers' for gpt2; choices: .*n_layer") as said:
        check_keys({"model_type": "gpt2", "n_layers": 3}, "here")
    assert said.value.error_facts["code"] == "PHX-I036"


def test_no_older_key_that_a_family_takes_is_refused_early():
    for name, family in CODE.items():
        check_keys({"model_type": name, **dict.fromkeys(family.old_keys, 1)}, "here")


@pytest.mark.parametrize("family", ["../gpt2", "no_such", 7, None, "gemma3_text"])
def test_of_a_class_that_is_not_understood_nothing_is_said(family):
    check_keys({"model_type": family, "n_layers": 3}, "here")
