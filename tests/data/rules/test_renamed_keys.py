"""A key that was renamed is read under both names, and a recipe that holds the older one keeps its digest."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from phalanx.config import digest_config
from phalanx.data.build.steps import STEPS
from phalanx.federated.config import FedBuffConfig, FederatedConfig

SECTIONS = [row.config for row in STEPS.values()] + [FedBuffConfig, FederatedConfig]
RENAMED = [(config, key, field) for config in SECTIONS for key, field in config.model_fields.items() if field.alias]

REQUIRED = {
    FederatedConfig: {"sites": ("a", "b", "c")},
    FedBuffConfig: {"kind": "fedbuff", "buffer": 2},
    STEPS["decontamination"].config: {"sets": ({"name": "questions", "path": Path("q.jsonl"), "fields": ("text",)},)},
}


@pytest.mark.parametrize(
    ("kind", "written", "digest"),
    [
        ("gopher_quality", '{"most_words": 7000}', "5facbc8c2e02601c206301ce9528b0de19e998e34d3dd09fae0f34506a0f8915"),
        (
            "gopher_repetition",
            '{"most_lines": 0.5}',
            "eee6c9a732095d11c6e44c59b8c8e28db0dad4fab18b5dc12d9ac48ec165f105",
        ),
    ],
)
def test_the_digest_is_the_one_from_before_the_key_was_renamed(kind, written, digest):
    config = STEPS[kind].config

    assert digest_config(config.model_validate_json(written)) == digest
    assert digest_config(config.model_validate_json(written.replace("most_", "max_"))) == digest


def test_every_renamed_key_is_read_under_both_names_but_not_under_two_at_once():
    assert len(RENAMED) > 40
    for config, key, field in RENAMED:
        required, value = REQUIRED.get(config, {}), field.default

        by_key, by_alias = (config(**required, **{name: value}) for name in (key, field.alias))

        assert by_key == by_alias
        assert digest_config(by_key) == digest_config(by_alias) and field.alias in by_key.model_dump()
        with pytest.raises(ValidationError, match="Extra inputs"):
            config(**required, **{key: value, field.alias: value})


def test_an_error_names_the_key_as_the_file_has_it():
    for name in ("least_words", "min_words"):
        with pytest.raises(ValidationError) as refused:
            STEPS["length"].config.model_validate({name: -1})

        assert refused.value.errors()[0]["loc"] == (name,)
