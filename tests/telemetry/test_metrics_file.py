import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import InputError
from phalanx.telemetry import MetricsFile, read_metrics


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def write_steps(path, steps):
    with MetricsFile(path) as metrics:
        for step in steps:
            metrics.append_record({"step": step, "loss": 1.0 / step})


def test_each_step_is_one_line_that_can_be_read_at_once(path):
    metrics = MetricsFile(path)

    metrics.append_record({"step": 1, "loss": 2.5, "bytes": {"owner>worker-1": 10}})

    assert read_metrics(path) == [{"step": 1, "loss": 2.5, "bytes": {"owner>worker-1": 10}}]
    metrics.close()


def test_resume_drops_later_steps_and_half_a_line(path):
    write_steps(path, range(1, 8))
    with path.open("a") as stream:
        stream.write('{"step": 8, "lo')

    metrics = MetricsFile(path)
    metrics.truncate_after(4)
    metrics.append_record({"step": 5, "loss": 0.5})
    metrics.close()

    assert [record["step"] for record in read_metrics(path)] == [1, 2, 3, 4, 5]
    assert [entry.name for entry in path.parent.iterdir()] == ["metrics.jsonl"]


def test_truncating_a_file_that_was_never_written_is_fine(path):
    MetricsFile(path).truncate_after(3)

    assert not path.exists()


@given(cut=st.integers(min_value=1, max_value=9000), filler=st.integers(min_value=0, max_value=9000))
def test_half_a_line_of_any_length_never_joins_the_next_one(tmp_path_factory, cut, filler):
    path = tmp_path_factory.mktemp("cut") / "metrics.jsonl"
    path.write_text(json.dumps({"step": 1, "filler": "x" * filler}) + "\n" + "y" * cut)

    with MetricsFile(path) as metrics:
        metrics.append_record({"step": 2})

    assert [record["step"] for record in read_metrics(path)] == [1, 2]


def test_a_loss_that_is_not_finite_is_null_and_named(path):
    with MetricsFile(path) as metrics:
        metrics.append_record({"step": 1, "loss": float("nan"), "phases": {"forward": float("inf")}})

    assert read_metrics(path) == [
        {"step": 1, "loss": None, "phases": {"forward": None}, "non_finite": ["loss", "phases.forward"]}
    ]


@pytest.mark.parametrize("record", [{}, {"step": "1"}, {"step": True}, {"step": 1, "loss": b"1"}])
def test_a_record_that_is_not_a_step_of_json_data_is_refused(path, record):
    with pytest.raises(InputError):
        MetricsFile(path).append_record(record)

    assert not path.exists()


@pytest.mark.parametrize("line", ["{", "[1]", '{"loss": 1}', '{"step": 1.5}', "\x00", ""])
def test_a_malformed_line_is_named_by_its_number(path, line):
    path.write_text('{"step": 1}\n' + line + '\n{"step": 3}\n')

    with pytest.raises(InputError, match=r"metrics.jsonl:2: "):
        read_metrics(path)


def test_a_missing_file_is_named(path):
    with pytest.raises(InputError, match="cannot be read"):
        read_metrics(path)
