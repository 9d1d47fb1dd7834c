"""A relative path begins where phalanx was started; one that lies beside the run file alone is refused."""

import pytest

from phalanx.config import check_relative_paths
from phalanx.errors import ConfigError


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A directory to start from, with a run file in a folder and files beside it."""
    (tmp_path / "runs" / "data").mkdir(parents=True)
    for name in ("rows.jsonl", "data/train.csv", "own.jinja", "text"):
        (tmp_path / "runs" / name).touch()
    (tmp_path / "here.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("data", "key", "instead"),
    [
        ({"data": {"sources": [{"path": "here.jsonl"}, {"path": "rows.jsonl"}]}}, "data.sources.1.path", "rows.jsonl"),
        ({"data": {"prompts": ["rows.jsonl"]}}, "data.prompts.0", "rows.jsonl"),
        (
            {"data": {"labelled": {"task": {"train": ["data/train.csv"]}}}},
            "data.labelled.task.train.0",
            "data/train.csv",
        ),
        ({"data": {"conversations": {"template": "own.jinja"}}}, "data.conversations.template", "own.jinja"),
        ({"model": {"path": "data"}}, "model.path", "data"),
        ({"pipeline": {"pki": "data"}}, "pipeline.pki", "data"),
    ],
)
def test_a_file_that_lies_beside_the_run_file_alone_is_refused_with_the_path_to_write(home, data, key, instead):
    with pytest.raises(ConfigError) as caught:
        check_relative_paths(data, home / "runs" / "run.toml")

    said = str(caught.value)
    assert f"{key}: " in said
    assert f"is looked for in {home}, where phalanx was started" in said
    assert f"it lies beside the run file: write runs/{instead}, or start phalanx in" in said
    assert caught.value.error_facts["key"] == key


@pytest.mark.parametrize(
    "data",
    [
        {"data": {"sources": [{"path": "here.jsonl"}]}},
        {"data": {"sources": [{"path": "nowhere.jsonl"}, {"kind": "text"}]}},
        {"data": {"sources": [{"path": "s3://bucket/rows.jsonl"}]}},
        {"data": {"conversations": {"template": "data"}}},
        {"train": {"steps": 3}, "name": "text"},
        {"model": {"path": ""}},
    ],
)
def test_what_is_there_nowhere_or_no_path_is_left_to_others(home, data):
    check_relative_paths(data, home / "runs" / "run.toml")


def test_an_absolute_path_is_left_as_it_is(home):
    check_relative_paths({"model": {"path": str(home / "runs" / "data")}}, home / "runs" / "run.toml")
