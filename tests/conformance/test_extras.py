"""Every extra of the package is one that `scripts/extras.py` installs alone, and its parts of CI leave none out."""

import importlib.util
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("extras", ROOT / "scripts" / "extras.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_extra_for_users_is_checked(script):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    assert set(script.extras()) == set(project["optional-dependencies"]) - {"dev", "benchmark"}


def test_the_shares_of_eight_runs_have_each_extra_once(script):
    names = list(script.extras())

    assert sorted(name for turn in range(16, 24) for name in script.shared(names, f"{turn}/8")) == sorted(names)
    assert re.search(r'scripts/extras\.py --share="\$turn/8"', (ROOT / ".ci" / "run").read_text(encoding="utf-8"))


def test_what_is_linked_is_the_base_installation_and_no_extra(script, tmp_path):
    script.link_base(tmp_path)

    linked = {path.name for path in tmp_path.iterdir()}
    assert {"torch", "transformers", "pydantic"} <= linked
    assert not linked & {"peft", "tensorboard", "sentencepiece", "pytest"}


@pytest.mark.slow
def test_a_small_extra_installs_alone_and_imports(script):
    assert sys.prefix != sys.base_prefix, "run in the environment that make install made"

    assert script.check("sandbox", script.extras()["sandbox"]) is None
