"""An approval of a release is of one model: who shows a directory to a second person cannot exchange it afterwards."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from phalanx.errors import PolicyError
from phalanx.governance.release import release_target

MODEL = Path(__file__).parents[1] / "vectors" / "passport" / "model"


@pytest.fixture
def shown(tmp_path: Path) -> Path:
    """The directory that a second person looks at: other weights lie in it as notes."""
    home = Path(shutil.copytree(MODEL, tmp_path / "model"))
    (home / "license.txt").write_bytes(b"other weights")
    (home / ".git").mkdir()
    (home / ".git" / "model.safetensors").write_bytes(b"weights")
    return home


def rename_files(home: Path) -> None:
    """The contents keep their order, and another one is the model."""
    (home / "model.safetensors").rename(home / "notes.txt")
    (home / "license.txt").rename(home / "model.safetensors")


def exchange_what_git_hides(home: Path) -> None:
    (home / ".git" / "model.safetensors").write_bytes(b"others!")


@pytest.mark.parametrize("change", [rename_files, exchange_what_git_hides])
def test_a_changed_directory_is_another_target(shown: Path, change: Callable[[Path], None]) -> None:
    before = release_target(shown)
    assert release_target(Path(shutil.copytree(shown, shown.with_name("copy")))) == before
    change(shown)

    assert release_target(shown) != before


def test_a_link_to_a_directory_cannot_be_approved(shown: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (shown / "more").symlink_to(tmp_path / "elsewhere")

    with pytest.raises(PolicyError, match="link to a directory"):
        release_target(shown)
