"""Tables of the docs are made again from the raw results that they name, row by row."""

import pytest
from measured_tables import ROOT, TABLES
from reproduced_tables import REPRODUCED


@pytest.mark.parametrize("table", [*TABLES, *REPRODUCED], ids=str)
def test_every_row_of_a_table_is_that_of_its_raw_result(table):
    page = (ROOT / table.page).read_text(encoding="utf-8")

    rows = table.made_again()

    assert rows
    assert [row for row in rows if row not in page] == []
    assert table.result in page
