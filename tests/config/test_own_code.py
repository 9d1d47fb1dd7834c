"""Code of the user's own is found where the run file says, is the code that was hashed, and is refused with a cause."""

import hashlib
import importlib.machinery
import sys
import types

import pytest

from phalanx.config import (
    changed_code,
    open_own_code,
    own_code,
    own_references,
    pin_own_code,
    pin_reference,
    resolve_kind,
)
from phalanx.config.code_source import KEPT_CODE, find_source, installed_roots, is_own, parse_reference
from phalanx.errors import ConfigError


def written(tmp_path, text, name="mine.py"):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def opened(tmp_path, text, name="thing"):
    """What a file's object is, by way of pin, open and resolve."""
    written(tmp_path, text)
    kind = pin_reference(f"mine.py:{name}", tmp_path)
    open_own_code(kind, tmp_path)
    return resolve_kind(kind, {}, lambda said, found: (said, found))


def test_a_file_beside_the_run_file_is_pinned_then_run(tmp_path):
    text = "thing = [1, 2]\n"

    said, found = opened(tmp_path, text)

    assert (said, found) == ("mine.py:thing", [1, 2])
    digest = hashlib.sha256(text.encode()).hexdigest()
    assert pin_reference("mine.py:thing", tmp_path) == f"mine.py:thing@{digest}"
    assert not list(tmp_path.rglob("__pycache__"))


def test_pinning_runs_nothing_and_touches_nothing_that_is_pinned(tmp_path):
    written(tmp_path, "raise RuntimeError")
    there = f"gone.py:thing@{'a' * 64}"
    data = {"train": {"objective": "mine.py:loss"}, "data": {"sources": [{"kind": "text"}, {"kind": there}]}}

    pin_own_code(data, tmp_path)

    assert data["data"]["sources"] == [{"kind": "text"}, {"kind": there}]
    assert own_references(data) == [data["train"]["objective"], there]
    assert parse_reference(data["train"]["objective"]).digest


def test_options_are_the_users_own_and_no_reference(tmp_path):
    data = {"kind": "text", "options": {"kind": "http://example.org:80"}}

    pin_own_code(data, tmp_path)

    assert own_references(data) == []


def test_what_runs_are_the_bytes_that_were_hashed(tmp_path, monkeypatch):
    path = written(tmp_path, "thing = 'hashed'\n")
    kind = pin_reference("mine.py:thing", tmp_path)
    find = own_code.find_source

    def find_then_change(*arguments):
        source = find(*arguments)
        path.write_text("thing = 'changed'\n")
        return source

    monkeypatch.setattr("phalanx.config.own_code.find_source", find_then_change)
    open_own_code(kind, tmp_path)

    assert resolve_kind(kind, {}, lambda said, found: found) == "hashed"


def test_changed_code_is_refused_with_what_was_found_and_expected(tmp_path):
    path = written(tmp_path, "thing = 'before'\n")
    kind = pin_reference("mine.py:thing", tmp_path)
    path.write_text("thing = 'after'\n")

    with pytest.raises(
        ConfigError, match=r"mine\.py: found SHA-256 [0-9a-f]{12}\.\.\., expected [0-9a-f]{12}\.\.\.; put"
    ):
        open_own_code(kind, tmp_path)

    assert changed_code([kind], [pin_reference("mine.py:thing", tmp_path)]).startswith(
        "mine.py has changed: found SHA-256 "
    )
    assert changed_code([kind], [kind]) is None


def test_two_files_of_one_name_are_two_things(tmp_path):
    kinds = []
    for folder in ("one", "two"):
        written(tmp_path, f"thing = {folder!r}\n", f"{folder}/mine.py")
        kinds.append(pin_reference("mine.py:thing", tmp_path / folder))
        open_own_code(kinds[-1], tmp_path / folder)

    assert [resolve_kind(kind, {}, lambda said, found: found) for kind in kinds] == ["one", "two"]


def test_a_reference_alone_loads_nothing(tmp_path):
    written(tmp_path, "thing = 'a peer named it'\n")
    kind = pin_reference("mine.py:thing", tmp_path)

    with pytest.raises(ConfigError, match="code that this process has not loaded from a file of its own"):
        resolve_kind(kind, {}, lambda said, found: found)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("mine.py:a.b", "found 'a.b' behind the colon; expected one name"),
        ("mine.py:", "found '' behind the colon"),
        ("../mine.py:thing", "expected a file in the run file's directory or below it"),
        ("/mine.py:thing", "expected a file in the run file's directory or below it"),
        ("mine.txt/x:thing", "expected a file that ends in .py, or an installed module"),
        ("mine.py:thing@0f", "found '0f' behind the @; expected 64 digits"),
        ("gone.py:thing", r"gone\.py: not found; .* is looked for in the directory of the run file"),
        ("folder.py:thing", r"folder\.py: not found"),
        ("nowhere_installed:thing", "no installed package has a module 'nowhere_installed'"),
        ("typer.no_such_part:thing", "has no module 'no_such_part'"),
    ],
)
def test_what_cannot_be_found_is_refused_before_anything_runs(tmp_path, kind, said):
    (tmp_path / "folder.py").mkdir()

    with pytest.raises(ConfigError, match=said):
        pin_own_code({"kind": kind}, tmp_path)


def test_a_link_that_leads_out_of_the_directory_is_refused(tmp_path):
    written(tmp_path, "thing = 1", "elsewhere/mine.py")
    home = tmp_path / "home"
    home.mkdir()
    (home / "mine.py").symlink_to(tmp_path / "elsewhere" / "mine.py")

    with pytest.raises(ConfigError, match=r"leads to .*elsewhere/mine\.py, outside .*home; copy the file"):
        pin_reference("mine.py:thing", home)


def test_a_module_of_the_working_directory_is_not_imported_by_accident(tmp_path, monkeypatch):
    written(tmp_path, "raise RuntimeError('ran')", "by_accident.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")

    with pytest.raises(ConfigError, match="no installed package has a module 'by_accident'; install it, or name"):
        pin_reference("by_accident:thing", tmp_path)

    assert "by_accident" not in sys.modules


def test_a_file_that_would_come_before_the_installed_module_is_refused(tmp_path, monkeypatch):
    installed = next(root for root in installed_roots() if (root / "pluggy").is_dir())
    written(tmp_path, "raise RuntimeError('ran')", "pluggy/__init__.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "pluggy")

    with pytest.raises(ConfigError, match=rf"would be imported in the place of the installed {installed}"):
        pin_reference("pluggy:PluginManager", tmp_path)


def test_an_installed_module_is_pinned_by_all_files_of_its_package(tmp_path, monkeypatch):
    home = tmp_path / "site"
    written(home, "", "ourpack/__init__.py")
    part = written(home, "thing = 7\n", "ourpack/part.py")
    written(home, "", "ourpack/deep/other.py")
    monkeypatch.setattr("phalanx.config.code_source.installed_roots", lambda: [home])
    monkeypatch.syspath_prepend(str(home))

    kind = pin_reference("ourpack.part:thing", tmp_path)
    open_own_code(kind, tmp_path)

    assert resolve_kind(kind, {}, lambda said, found: found) == 7
    for path in (part, home / "ourpack" / "deep" / "other.py"):
        before = path.read_text()
        path.write_text(before + "# changed\n")
        assert pin_reference("ourpack.part:thing", tmp_path) != kind
        path.write_text(before)
    assert pin_reference("ourpack.part:thing", tmp_path) == kind


def test_an_error_while_loading_shows_the_users_lines_and_none_of_ours(tmp_path):
    text = "def fill():\n    return {}['chats']\n\n\nfill()\n"

    with pytest.raises(ConfigError, match="cannot be loaded") as refused:
        opened(tmp_path, text)

    said = str(refused.value)
    assert "line 5, in <module>" in said
    assert "line 2, in fill" in said
    assert said.endswith("KeyError: 'chats'")
    assert "own_code.py" not in said and "importlib" not in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def broken(:\n", "SyntaxError: invalid syntax"),
        ("import no_such_module_anywhere\n", "ModuleNotFoundError: No module named 'no_such_module_anywhere'"),
        ("import sys\nsys.exit(3)\n", "SystemExit: 3"),
        ("other = 1\n", "has no 'thing'; it has other"),
    ],
)
def test_code_that_cannot_be_loaded_is_one_error(tmp_path, text, said):
    with pytest.raises(ConfigError, match=said):
        opened(tmp_path, text)

    # nothing half made stays behind
    with pytest.raises(ConfigError, match=said):
        opened(tmp_path, text)


def test_a_file_beside_it_that_no_digest_covers_is_refused(tmp_path, monkeypatch):
    written(tmp_path, "x = 1\n", "uncovered_helper.py")
    monkeypatch.syspath_prepend(str(tmp_path))

    with pytest.raises(ConfigError, match=r"imports .*uncovered_helper\.py, which no digest covers; put everything"):
        opened(tmp_path, "import uncovered_helper\nthing = 1\n")


def test_the_resolved_run_file_finds_the_copy_that_the_run_directory_keeps(tmp_path):
    path = written(tmp_path, "thing = 'kept'\n")
    kind = pin_reference("mine.py:thing", tmp_path)
    run_dir = tmp_path / "run"
    written(run_dir, path.read_text(), f"code/{parse_reference(kind).digest}.py")

    open_own_code(kind, run_dir)

    assert resolve_kind(kind, {}, lambda said, found: found) == "kept"


# --- where it is looked for ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [None, 5, ["mine.py:thing"], "text"])
def test_what_is_no_text_with_a_colon_is_no_code_of_the_users_own(kind):
    assert not is_own(kind)


def test_a_file_in_a_folder_may_have_any_name(tmp_path):
    written(tmp_path, "thing = 1\n", "my code/mine-2.py")

    assert parse_reference(pin_reference("my code/mine-2.py:thing", tmp_path)).digest


@pytest.mark.parametrize("over", [0, 1])
def test_a_file_of_the_greatest_length_is_read_and_a_longer_one_refused(tmp_path, monkeypatch, over):
    monkeypatch.setattr("phalanx.config.code_source._MAX_BYTES", 10)
    written(tmp_path, "x" * (10 + over))

    if over:
        with pytest.raises(ConfigError, match="longer than 10 bytes"):
            pin_reference("mine.py:thing", tmp_path)
    else:
        assert pin_reference("mine.py:thing", tmp_path)


def test_a_kept_copy_stands_for_a_file_only_where_the_file_is_gone(tmp_path):
    path = written(tmp_path, "thing = 'before'\n")
    kind = pin_reference("mine.py:thing", tmp_path)
    reference = parse_reference(kind)
    kept = written(tmp_path, "thing = 'before'\n", f"{KEPT_CODE}/{reference.digest}.py")

    path.write_text("thing = 'after'\n")
    assert find_source(reference, tmp_path).source_digest != reference.digest

    path.unlink()
    assert find_source(reference, tmp_path).path == kept
    kept.unlink()
    with pytest.raises(ConfigError, match=r"mine\.py: not found"):
        find_source(reference, tmp_path)


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """An empty folder of installed packages."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.setattr("phalanx.config.code_source.installed_roots", lambda: [folder])
    monkeypatch.syspath_prepend(folder)
    return folder


def test_a_folder_without_code_of_its_own_is_no_installed_module(installed):
    (installed / "only_a_folder").mkdir()

    with pytest.raises(ConfigError, match="no installed package has a module 'only_a_folder'"):
        find_source(parse_reference("only_a_folder:thing"), installed)


def test_a_compiled_module_is_none_either(installed):
    (installed / f"compiled_module{importlib.machinery.EXTENSION_SUFFIXES[0]}").touch()

    with pytest.raises(ConfigError, match="no installed package has a module 'compiled_module'"):
        find_source(parse_reference("compiled_module:thing"), installed)


@pytest.mark.parametrize("origin", [None, "namespace"])
def test_a_module_that_was_put_in_the_place_of_an_installed_one_is_refused(installed, monkeypatch, origin):
    written(installed, "thing = 1\n", "shadowed_module.py")
    in_its_place = types.ModuleType("shadowed_module")
    in_its_place.__spec__ = origin and importlib.machinery.ModuleSpec("shadowed_module", None)
    monkeypatch.setitem(sys.modules, "shadowed_module", in_its_place)

    with pytest.raises(ConfigError, match="None would be imported in the place of the installed"):
        find_source(parse_reference("shadowed_module:thing"), installed)


def test_folders_that_a_pth_file_adds_are_installed_ones_and_its_code_is_none(tmp_path, monkeypatch):
    folder = tmp_path / "site-packages"
    written(folder, "# a remark\n\nimport os\nimport\tos\n../editable\n", "some.pth")
    monkeypatch.setattr("site.getsitepackages", lambda: [str(folder)])
    monkeypatch.setattr("site.getusersitepackages", lambda: str(folder))
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(folder))

    assert installed_roots() == [folder, tmp_path / "editable"]
