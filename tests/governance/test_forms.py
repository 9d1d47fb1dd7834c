"""Forms about a run: every field has its source or is a blank, and no text of a run leaves its place."""

import json
import re
import tomllib
from pathlib import Path

import pytest

from phalanx.errors import ConfigError
from phalanx.governance.forms import fill_form, form_names, load_template, render_form, write_forms
from phalanx.redteam.table import ATTACKS_ON_MODELS
from phalanx.train import RUN_TYPES

ROOT = Path(__file__).resolve().parents[2]
HOSTILE = "x](http://evil.example) <script>alert(1)</script> | `rm` # \n## Forged\x1b[2J www.evil.example"
KNOWN_FILES = {
    "config.toml",
    "summary.json",
    "events.jsonl",
    "dataset.json",
    "evaluation.json",
    "redteam/redteam.json",
    "roles.json",
    "model/config.json",
    "checkpoints",
    "derived",
}
SOURCE = {"name": HOSTILE, "kind": "file", "licence": "CC-BY-4.0", "documents": 2, "tokens": 5, "share": 1.0}


def sources_of(name: str) -> list[str]:
    template = load_template(name)
    return [
        s for section in template.sections for s in (*section.when, *(x for f in section.fields for x in f.sources))
    ]


@pytest.mark.parametrize("name", form_names())
def test_every_field_has_a_source_or_is_a_blank(name):
    form = fill_form(name, {})

    assert all(value.source is None and value.value is None and value.ask for value in form.values)
    assert {source.partition(":")[0] for source in sources_of(name)} <= KNOWN_FILES


@pytest.mark.parametrize("name", form_names())
def test_sources_name_keys_that_runs_have(name):
    keys = {"summary.json": set(), "config.toml": {name for kind in RUN_TYPES.members for name in kind.model_fields}}
    keys["summary.json"] = set(tomllib.loads((ROOT / "scripts" / "output_keys.toml").read_text())["summary"])
    keys["redteam/redteam.json"] = {"findings", *ATTACKS_ON_MODELS}
    for source in sources_of(name):
        file, _, key = source.partition(":")
        assert key.partition(".")[0] in keys.get(file, {key.partition(".")[0]}), source


def test_a_figure_that_is_missing_is_a_blank_and_never_a_zero():
    documents = {"summary.json": {"steps": 3, "tokens": None, "verdicts": [], "in_doubt": False}}
    values = {value.title: value for value in fill_form("model_card", documents).values}

    assert (values["Applied steps"].value, values["Applied steps"].source) == (3, ("summary.json", "steps"))
    assert values["Tokens"].source is None
    assert values["Parties that were convicted"].source is None
    assert values["Steps in doubt"].value is False
    assert values["Operations, estimated as 6 x parameters x tokens"].value is None


@pytest.mark.parametrize("name", form_names())
def test_hostile_texts_of_a_run_stay_in_their_place(name):
    documents = {
        "derived": {"name": HOSTILE, "engine": HOSTILE},
        "dataset.json": {"sources": [SOURCE], "licences": [HOSTILE], "tools": {HOSTILE: HOSTILE}},
        "summary.json": {"verdicts": [{"party": HOSTILE, "reason": HOSTILE}]},
    }
    form = fill_form(name, documents)
    text = render_form(form)

    assert "<script" not in text
    assert "\x1b" not in text
    assert "](http" not in text
    assert "http:" not in text
    assert "www.evil" not in text
    assert not any(line.startswith("## Forged") for line in text.splitlines())
    for row in (line for line in text.splitlines() if line.startswith("| x")):
        assert len(re.findall(r"(?<!\\)\|", row)) == len(re.findall(r"(?<!\\)\|", _head_of(text, row)))
    json.dumps(form.to_json(), allow_nan=False)


def _head_of(text: str, row: str) -> str:
    lines = text.splitlines()
    return next(lines[n - 1] for n in range(lines.index(row), 0, -1) if lines[n].startswith("| ---"))


def test_sections_of_other_kinds_of_runs_are_left_out():
    titles = [title for title, _, _ in fill_form("model_card", {}).sections]
    assert not {"Sites that kept their data", "Parties that kept labels or texts"} & set(titles)
    documents = {
        "config.toml": {
            "federated": {"sites": ["north", "south"], "sums": "masked", "aggregator": {"kind": "median"}},
            "privacy": {"epsilon": 3.0, "delta": 1e-5},
            "split": {"clients": 2, "tier": "process", "mode": "sealed"},
        },
        "summary.json": {"federated": {"rounds": 4}, "privacy": {"epsilon_spent": 1.5}, "split": {"mode": "sealed"}},
    }
    for name in ("model_card", "data_sheet"):
        values = {value.title: value.value for value in fill_form(name, documents).values}
        assert values["Sites"] == ["north", "south"]
        assert values["Budget"] == {"epsilon_spent": 1.5}
        assert values["Enclave"] == "process"
        assert values["Rounds"] == {"rounds": 4}
    risks = [title for title, _, _ in fill_form("risk_register", documents).sections]
    assert "Some sites bend the model" in risks
    assert "A party computes something else" not in risks


def test_risks_name_rows_of_the_threat_model():
    lines = (ROOT / "docs" / "threat_model.md").read_text(encoding="utf-8").splitlines()
    rows = [line.split("|")[1].strip() for line in lines if line.startswith("| ")]
    for section in load_template("risk_register").sections:
        assert any(row.startswith(section.threat) for row in rows), section.threat


def test_a_residual_risk_is_the_raw_score_of_the_attack_or_null():
    documents = {"config.toml": {"data": {"sequence_length": 8}}}
    title = "The model tells what it was trained on"
    measured = {"membership_reference": {"score": 0.73}}
    for report, value in (({}, None), ({"redteam/redteam.json": measured}, 0.73)):
        form = fill_form("risk_register", {**documents, **report})
        fields = next(values for name, _, values in form.sections if name == title)
        assert next(field.value for field in fields if field.title == "Measured residual risk") == value


def test_forms_are_the_same_bytes_each_time_and_written_over_nothing(tmp_path):
    documents = {"summary.json": {"steps": 3}, "dataset.json": {"tools": {"b": "1", "a": "2"}}}
    for folder in ("first", "second"):
        write_forms(documents, tmp_path / folder)
    for file in sorted((tmp_path / "first").iterdir()):
        assert file.read_bytes() == (tmp_path / "second" / file.name).read_bytes()
    with pytest.raises(ConfigError, match="exists"):
        write_forms(documents, tmp_path / "first", ["model_card"])
    with pytest.raises(ConfigError, match="expected one of data_sheet"):
        write_forms(documents, tmp_path / "third", ["../secret"])
