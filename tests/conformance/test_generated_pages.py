"""The parts of the documentation that the code determines are as `scripts/generated_pages.py` writes them."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
from generated_pages import (  # noqa: E402 - found beside the documentation
    output_page,
    support_page,
    with_attacks,
    with_floors,
    with_metrics,
    with_rights,
)

AGAIN = "run `python scripts/generated_pages.py`"


def test_the_page_of_what_engines_support_is_that_of_the_matrix():
    assert (ROOT / "docs" / "support.md").read_text(encoding="utf-8") == support_page(), AGAIN


def test_the_page_of_output_files_has_every_key_that_the_code_writes():
    """A key without a meaning in `scripts/output_keys.toml`, or the reverse, is an error of the script."""
    assert (ROOT / "docs" / "output_files.md").read_text(encoding="utf-8") == output_page(), AGAIN


def test_the_drawing_of_floors_is_that_of_the_import_contract():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")

    assert page == with_floors(page), AGAIN
    assert "\nfederated " in page and "\n| serve " in page


def test_the_names_of_training_metrics_are_those_of_their_classes():
    page = (ROOT / "docs" / "watching.md").read_text(encoding="utf-8")

    assert page == with_metrics(page), AGAIN
    assert "`phalanx_security_events_total`" in page


def test_the_attacks_on_the_page_of_configuration_are_those_of_the_table():
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")

    assert page == with_attacks(page), AGAIN
    assert "`league`" in page and with_attacks(page.replace("`league`, ", "")) == page


def test_the_roles_of_commands_and_calls_are_those_of_the_table():
    page = (ROOT / "docs" / "roles.md").read_text(encoding="utf-8")

    assert page == with_rights(page), AGAIN
    assert "| `phalanx checkpoint rotate` | `owner`, `data_steward` | `key_rotation` |" in page
