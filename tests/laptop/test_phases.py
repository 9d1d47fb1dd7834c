"""What a later start does, by what is on disk."""

import shutil

import pytest

from phalanx.errors import ConfigError, DataError
from phalanx.laptop.entry import in_words, score_rows
from phalanx.laptop.folder import read_lines
from phalanx.laptop.phases import (
    FILE_OF,
    PHASES,
    PhaseRecord,
    digest_inputs,
    dump_lines,
    forget_phases,
    list_open_phases,
    read_records,
    write_record,
)


@pytest.fixture
def folder(tmp_path):
    """A folder whose first two phases are done."""
    for name in FILE_OF.values():
        (tmp_path / name).write_text(f"# {name}")
    inputs = digest_inputs(tmp_path)
    for phase in PHASES[:2]:
        write_record(tmp_path, PhaseRecord(phase=phase, inputs=inputs[phase], seconds=1.0, is_resumed=False, facts={}))
    return tmp_path


def open_phases(folder):
    return list(list_open_phases(read_records(folder), digest_inputs(folder)))


def test_rows_of_texts_come_back_whatever_ends_lines_in_them(tmp_path):
    rows = [{"text": "one\u2028two\x85three\x0cfour\n"}, {"text": "five"}]
    (tmp_path / "held_out.jsonl").write_text(dump_lines(rows), encoding="utf-8")

    assert read_lines(tmp_path / "held_out.jsonl") == rows


def test_a_new_folder_begins_with_the_first_phase(folder):
    shutil.rmtree(folder / "done")

    assert open_phases(folder) == list(PHASES)


def test_phases_that_are_done_are_not_repeated(folder):
    assert open_phases(folder) == ["chat", "preferences", "evaluate", "report"]


def test_a_run_file_may_be_changed_before_its_phase_has_begun(folder):
    (folder / "chat.toml").write_text("steps = 5")

    assert open_phases(folder)[0] == "chat"


@pytest.mark.parametrize("name", ["tokenizer.toml", "pretrain.toml"])
def test_a_run_file_that_was_changed_behind_its_phase_is_refused_with_the_way_out(folder, name):
    (folder / name).write_text("changed")

    with pytest.raises(ConfigError, match=f"{name}: was changed .* --redo {name.removesuffix('.toml')}"):
        open_phases(folder)


def test_a_record_without_those_before_it_counts_for_nothing(folder):
    (folder / "done" / "tokenizer.json").unlink()

    assert open_phases(folder) == list(PHASES)


@pytest.mark.parametrize("text", ["", "{", '{"phase": "pretrain"}', "[]"])
def test_a_damaged_record_is_named(folder, text):
    (folder / "done" / "pretrain.json").write_text(text)

    with pytest.raises(DataError, match="is damaged; repeat the phase with --redo pretrain"):
        read_records(folder)


def test_a_half_written_record_is_none(folder):
    (folder / "done" / "chat.json.part").write_text("{")

    assert "chat" not in read_records(folder)


def test_a_missing_run_file_is_named_with_its_phase(folder):
    (folder / "chat.toml").unlink()

    with pytest.raises(DataError, match="the phase chat needs it"):
        digest_inputs(folder)


def test_a_phase_is_forgotten_with_all_behind_it_and_the_run_files_stay(folder):
    for name in ("tokenizer", "runs/pretrain", "models/pretrain", "runs/chat"):
        (folder / name).mkdir(parents=True)

    forget_phases(folder, "pretrain", shutil.rmtree)

    assert open_phases(folder)[0] == "pretrain"
    assert (folder / "tokenizer").is_dir()
    assert not any((folder / name).exists() for name in ("runs/pretrain", "models/pretrain", "runs/chat"))
    assert all((folder / name).is_file() for name in FILE_OF.values())


def test_rows_are_read_as_they_were_written_whatever_their_texts_hold(tmp_path):
    rows = [{"text": f"left{end}right"} for end in ("\n", "\r", "\x0c", "\x85", "\u2028", "\u2029")]
    (tmp_path / "rows.jsonl").write_text(dump_lines(rows), encoding="utf-8")

    assert read_lines(tmp_path / "rows.jsonl") == rows


def test_scores_are_those_before_and_after_each_phase():
    facts = {
        "pretrain": {"before": 512.0, "after": 16.0},
        "chat": {"before": 40.0, "after": 20.0},
        "preferences": {"accuracy_first": 0.5, "accuracy": 0.9, "margin_first": 0.0, "margin": 2.0},
        "evaluate": {
            "scores": {
                "pretrain": {"bits_per_byte": 2.0, "perplexity": 16.0},
                "chat": {"bits_per_byte": 2.1, "perplexity": 18.0},
                "preferences": {"bits_per_byte": 2.2, "perplexity": 19.0},
            }
        },
    }

    rows = {(row["phase"], row["figure"]): (row["before"], row["after"]) for row in score_rows(facts)}

    # 9 bits a token before and 4 after, at half a token a byte
    assert rows["pretrain", "bits/byte, held-out text"] == (pytest.approx(4.5), 2.0)
    assert rows["chat", "bits/byte, held-out text"] == (2.0, 2.1)
    assert rows["chat", "perplexity, held-out answers"] == (40.0, 20.0)
    assert rows["preferences", "perplexity, held-out text"] == (18.0, 19.0)
    assert rows["preferences", "accuracy, held-out pairs"] == (0.5, 0.9)


@pytest.mark.parametrize(("seconds", "words"), [(0.4, "0 s"), (59.4, "59 s"), (60, "1 min 0 s"), (3725, "62 min 5 s")])
def test_times_are_told_in_minutes_and_seconds(seconds, words):
    assert in_words(seconds) == words
