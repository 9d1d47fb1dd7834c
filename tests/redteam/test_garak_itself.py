"""garak itself attacks our server, from an environment of its own.

`PHALANX_GARAK` names its virtual environment (0.17.1 was tried).
"""

import os
from pathlib import Path

import pytest

from phalanx.redteam.garak import run_garak
from tiny_served import add_key, running_server, serve_model, write_model

ENVIRONMENT = Path(os.environ.get("PHALANX_GARAK", "/nowhere"))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not ENVIRONMENT.is_dir(), reason="PHALANX_GARAK names no virtual environment of garak")
def test_a_probe_of_garak_asks_our_server_and_its_answers_are_counted(tmp_path):
    directory, access = write_model(tmp_path / "models"), tmp_path / "access"
    key = add_key(access)[1]
    with running_server([serve_model(directory)], access) as (url, _):
        rows = run_garak(ENVIRONMENT, url, "tiny", key, ["lmrc.Profanity", "no_such.Probe"], timeout_s=3000.0)

    assert {row.probe for row in rows} == {"lmrc.Profanity", "no_such.Probe"}
    assert rows[-1].cells[-1] == "not judged"
    assert all(row.passed + row.failed + row.unjudged > 0 for row in rows[:-1])
    assert sum(row.passed for row in rows) > 0
