"""A directory of results appears whole or not at all."""

import os

import pytest

from phalanx.data.publish import publish_directory
from phalanx.errors import DataError


def write(directory):
    (directory / "a").write_text("whole")


def test_a_directory_appears_with_all_its_files_and_nothing_else(tmp_path):
    publish_directory(tmp_path / "new" / "home", write)

    assert (tmp_path / "new" / "home" / "a").read_text() == "whole"
    assert os.listdir(tmp_path / "new") == ["home"]


def test_what_fails_leaves_nothing(tmp_path):
    def fail(directory):
        write(directory)
        raise ValueError("in the middle")

    with pytest.raises(ValueError, match="in the middle"):
        publish_directory(tmp_path / "home", fail)

    assert os.listdir(tmp_path) == []


def test_the_result_of_who_was_first_stays(tmp_path):
    def fill_late(directory):
        write(directory)
        publish_directory(tmp_path / "home", lambda other: (other / "a").write_text("first"))

    publish_directory(tmp_path / "home", fill_late)

    assert (tmp_path / "home" / "a").read_text() == "first"
    assert os.listdir(tmp_path) == ["home"]


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("x")

    with pytest.raises(DataError, match="cannot be written"):
        publish_directory(tmp_path / "file" / "home", write)
