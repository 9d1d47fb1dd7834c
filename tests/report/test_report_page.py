import html.parser
import json
import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_run import CONFIG, EVIDENCE, SUMMARY, VERDICT, event, make_run, metric, write_json, write_lines

from phalanx.errors import InputError
from phalanx.report import write_report
from phalanx.report.read import read_run

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>\u202eevil\x00"


class Page(html.parser.HTMLParser):
    """What a browser would make of a page: its elements, and the text outside of style sheets."""

    def __init__(self, source):
        super().__init__(convert_charrefs=True)
        self.tags, self.attributes, self.pieces = [], [], []
        self.feed(source)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes.extend(attrs)

    def handle_data(self, data):
        if self.tags[-1:] != ["style"]:
            self.pieces.append(data)

    @property
    def text(self):
        return re.sub(r"\s+", " ", " ".join(self.pieces))


def page_of(run_dir):
    path = write_report(run_dir)
    assert path == run_dir / "report.html"
    return Page(path.read_text(encoding="utf-8"))


@pytest.fixture
def run_dir(tmp_path):
    return make_run(tmp_path / "run")


def test_a_whole_run_is_told_in_one_sentence_and_every_section_is_there(run_dir):
    page = page_of(run_dir)

    assert "1 of 1 attacked steps detected, worker-1 (stage 1) evicted, 0 false accusations, 0 steps lost." in page.text
    assert "Notes" not in page.pieces
    for title in (
        "Loss",
        "Verdicts",
        "Audits",
        "Time per phase",
        "Bytes per link",
        "Stages",
        "Events",
        "Config",
    ):
        assert title in page.pieces
    assert page.tags.count("svg") == 4
    assert "step 104\ntraining: 4.393\nattacked, repaired" in "".join(page.pieces)


def test_a_log_that_does_not_hold_proves_no_step(run_dir):
    assert "Not proven: " in page_of(run_dir).text


def test_every_picture_is_well_formed_and_holds_no_nan(run_dir):
    source = write_report(run_dir).read_text()

    for picture in re.findall(r"<svg.*?</svg>", source, flags=re.DOTALL):
        ET.fromstring(picture)
        assert "nan" not in picture.lower()
        assert "inf" not in picture.lower()


def test_a_verdict_opens_to_its_evidence(run_dir):
    page = page_of(run_dir)

    assert VERDICT["reason"] in page.text
    assert "2, allowed 2e-05" in page.text
    assert f"Evidence: evidence/{EVIDENCE}" in page.text
    assert "output the disputed message worker-1" in page.text
    assert f"phalanx audit explain evidence/{EVIDENCE}" in page.text


def test_events_are_told_in_sentences_and_stages_end_with_whoever_took_over(run_dir):
    page = page_of(run_dir)

    assert "stage 1 is now served by worker-2, before by worker-1" in page.text
    assert "step 104: the result of worker-2 differs from that of stage 1" in page.text
    assert "2 times, last: after 100 steps" in page.text
    assert "1 2 to 3 1 574 912 worker-1 worker-2 worker-2" in page.text.replace("\u2009", " ")


def test_the_work_of_each_party_that_reported_any_is_shown(run_dir):
    page = page_of(run_dir)

    assert "CPU time worker-1 compute 27.1 s audit 2.5 s hashing of the links 0.5 s" in page.text
    assert "the whole process 47.9 s" in page.text


def test_bytes_between_workers_are_shown_as_claims(run_dir):
    assert "(claimed)" not in page_of(run_dir).text
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    write_lines(run_dir / "metrics.jsonl", [{**line, "bytes_claimed": ["worker-1>worker-2"]} for line in lines])

    page = page_of(run_dir).text

    assert "worker-1 → worker-2 (claimed)" in page
    assert "worker-2 → worker-1 (claimed)" not in page
    assert "Claims are from their senders only" in page


@pytest.mark.parametrize("claimed", [None, 3, "worker-1>worker-2", [{}], {"worker-1>worker-2": 1}])
def test_an_odd_list_of_claims_is_none(run_dir, claimed):
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    write_lines(run_dir / "metrics.jsonl", [{**line, "bytes_claimed": claimed} for line in lines])

    assert "(claimed)" not in page_of(run_dir).text


def test_the_preset_of_the_guard_is_named(run_dir):
    assert "preset strict" not in page_of(run_dir).text
    write_json(run_dir / "summary.json", {**SUMMARY, "preset": "strict"})

    assert "preset strict" in page_of(run_dir).text


def test_a_value_with_braces_is_never_filled_in(run_dir):
    lines = [event(0, 0, "lost", {"party": "{reason}", "reason": "secret"})]
    write_lines(run_dir / "events.jsonl", lines)

    assert "{reason} is lost" in page_of(run_dir).text


@pytest.mark.parametrize(
    "headers", [None, [], {"output": None}, {"output": {"header": "{"}}, {"output": {"header": "[]"}}]
)
def test_evidence_with_odd_headers_is_shown_as_far_as_it_goes(run_dir, headers):
    write_json(run_dir / "evidence" / EVIDENCE, {"headers": headers})

    assert f"Evidence: evidence/{EVIDENCE}" in page_of(run_dir).text


def test_the_page_asks_nobody_for_anything(run_dir):
    page = page_of(run_dir)

    assert "script" not in page.tags
    assert not [name for name, _ in page.attributes if name in ("src", "href") or name.startswith("on")]
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in page.attributes
    assert not re.search(r"url\(|@import", write_report(run_dir).read_text())


def hostile(value):
    """Put hostile text in place of every text, as value and as name."""
    if isinstance(value, dict):
        return {key: hostile(item) for key, item in value.items()} | {HOSTILE: 1}
    if isinstance(value, list):
        return [hostile(item) for item in value]
    return HOSTILE if isinstance(value, str) else value


def test_no_name_in_any_file_becomes_markup(tmp_path):
    run_dir = make_run(tmp_path / "run", steps=3)
    (run_dir / "config.toml").write_text(f"# {HOSTILE}".replace("\x00", ""))
    write_json(run_dir / "summary.json", hostile(SUMMARY) | {"evicted": [HOSTILE], "world": HOSTILE})
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    write_lines(run_dir / "metrics.jsonl", [{**hostile(row), "step": row["step"]} for row in rows])
    lines = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    bodies = [hostile(line["body"]) | {"evidence": EVIDENCE} for line in lines]
    told = [event(i, i, lines[i]["kind"], body) for i, body in enumerate(bodies)]
    write_lines(run_dir / "events.jsonl", [*told, event(99, 99, HOSTILE, {HOSTILE: HOSTILE})])
    write_json(run_dir / "evidence" / EVIDENCE, hostile(VERDICT))

    source = write_report(run_dir).read_text(encoding="utf-8")

    page = Page(source)
    assert "<script>alert(1)</script>" in page.text
    assert not {"script", "img"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert "\u202e" not in source
    assert "\x00" not in source
    for picture in re.findall(r"<svg.*?</svg>", source, flags=re.DOTALL):
        ET.fromstring(picture)


def test_evidence_outside_its_directory_is_never_shown(run_dir):
    (run_dir.parent / "secret.json").write_text('{"key": "do not show"}')
    write_lines(run_dir / "events.jsonl", [event(0, 0, "verdict", {**VERDICT, "evidence": "../../secret.json"})])

    page = page_of(run_dir)

    assert "do not show" not in page.text
    assert "Evidence file ../../secret.json is missing." in page.text


def test_a_directory_without_a_run_is_refused_and_gets_no_page(tmp_path):
    with pytest.raises(InputError, match=r"holds no run: none of config.toml, summary.json, .* is there; give"):
        write_report(tmp_path)

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("there", ["config.toml", "summary.json", "metrics.jsonl", "events.jsonl"])
def test_a_run_of_which_one_file_is_left_gives_a_page_that_says_what_is_missing(tmp_path, there):
    (tmp_path / there).write_text("{}" if there == "summary.json" else "")

    page = page_of(tmp_path)

    assert "No final figures: 0 steps recorded so far." in page.text
    for name in {"config.toml", "summary.json", "metrics.jsonl", "events.jsonl"} - {there}:
        assert f"{name} is missing" in page.text
    assert "Not known: there is no audit log." in page.text


def test_a_run_that_was_broken_off_shows_what_it_got_to(run_dir):
    (run_dir / "summary.json").unlink()
    whole = (run_dir / "metrics.jsonl").read_text()
    (run_dir / "metrics.jsonl").write_text("".join(whole.splitlines(keepends=True)[:20]) + '{"step": 21, "lo')

    page = page_of(run_dir)

    assert "No final figures: 20 steps recorded so far." in page.text
    assert "metrics.jsonl: line 21 cannot be read and was left out." in page.text
    assert "Not finished" in page.pieces


@pytest.mark.parametrize("loss", ["NaN", "Infinity", "-Infinity", "null", '"low"', "1e400", "[1]", "1e300", "true"])
def test_a_loss_that_is_no_number_leaves_a_gap(run_dir, loss):
    lines = [f'{{"step": {step}, "loss": {loss if step == 3 else step}}}' for step in range(1, 6)]
    (run_dir / "metrics.jsonl").write_text("\n".join(lines) + "\n")

    source = write_report(run_dir).read_text()

    assert "step 3\ntraining: no finite value" in source
    (path,) = re.findall(r'<path class="curve k0" d="([^"]*)"', source)
    assert re.sub(r"[-\d. ]", "", path) == "MLML"


def test_a_run_without_one_finite_loss_says_so(run_dir):
    write_lines(run_dir / "metrics.jsonl", [{"step": 1, "loss": None}])

    assert "No finite loss was recorded." in page_of(run_dir).text


@pytest.mark.parametrize("losses", [[2.0], [0.0, 0.0], [1e-9, 1e9], [-1.0, 5.0], [1e17, -1e17]])
def test_any_range_of_losses_can_be_drawn(run_dir, losses):
    write_lines(run_dir / "metrics.jsonl", [{"step": i, "loss": loss} for i, loss in enumerate(losses)])

    assert "svg" in page_of(run_dir).tags


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"attacks_injected": 0, "detections": 0, "evicted": []},
            "No lie was found in 1 600 audits, 0 steps lost.",
        ),
        ({"attacks_injected": 0, "audits": 0, "evicted": []}, "Nothing was audited, 0 steps lost."),
        # who lied is known of a drill alone, and where nobody was started a verdict is a false one
        ({"attacks_injected": 0, "false_accusations": 1}, "worker-1 (stage 1) evicted, 1 false accusation"),
        ({"attacks_injected": 7, "detections": None, "evicted": None}, "7 steps attacked, nobody checked"),
        ({"attacks_injected": None}, "200 steps trained, worker-1 (stage 1) evicted"),
        (
            {"attacks_injected": None, "false_accusations": None, "evicted": []},
            "No lie was found in 1 600 audits, 0 steps lost.",
        ),
        ({"steps_lost": 1}, "1 step lost."),
        ({"steps_lost": 0}, "0 steps lost."),
        ({"status": "interrupted"}, "Interrupted"),
        ({"validation_perplexity": None, "unigram_perplexity": None}, "not measured"),
    ],
)
def test_the_sentence_says_what_is_known_and_no_more(run_dir, change, sentence):
    write_json(run_dir / "summary.json", SUMMARY | change)

    assert sentence in page_of(run_dir).text


def test_a_run_without_a_guard_says_so(run_dir):
    (run_dir / "config.toml").write_text(CONFIG.replace('"phalanx"', '"off"'))
    write_json(run_dir / "summary.json", SUMMARY | {"detections": None, "evicted": []})

    assert "1 step attacked, nobody checked (the guard was off)" in page_of(run_dir).text


def test_a_long_run_is_drawn_in_bins(tmp_path):
    import random

    rng = random.Random(1)
    run_dir = make_run(tmp_path / "run", steps=1)
    write_lines(run_dir / "metrics.jsonl", [metric(step, rng) for step in range(1, 3001)])

    path = write_report(run_dir)

    assert "One bar is the mean of 32 steps." in path.read_text()
    assert path.stat().st_size < 1_000_000


def test_a_missing_directory_is_named(tmp_path):
    with pytest.raises(InputError, match="nowhere: is not a directory"):
        write_report(tmp_path / "nowhere")


def test_a_page_that_cannot_be_written_is_named(run_dir):
    (run_dir / "report.html").mkdir()

    with pytest.raises(InputError, match=r"report.html: cannot be written"):
        write_report(run_dir)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
METRIC_KEYS = ["loss", "audits", "alarms", "attempts", "attacked", "repaired", "phases", "bytes"]
BODY_KEYS = ["stages", "party", "stage", "reason", "distance", "allowed", "evidence", "step", "microbatch"]


def with_keys(keys):
    return st.dictionaries(st.sampled_from(keys), json_values, max_size=len(keys))


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    summary=with_keys(list(SUMMARY)),
    rows=st.lists(st.builds(lambda step, row: {**row, "step": step}, json_values, with_keys(METRIC_KEYS)), max_size=3),
    bodies=st.lists(with_keys(BODY_KEYS), max_size=3),
    kind=st.sampled_from(["run_started", "verdict", "evicted"]),
    time=json_values,
)
def test_no_json_in_any_file_makes_it_crash(tmp_path_factory, summary, rows, bodies, kind, time):
    run_dir = tmp_path_factory.mktemp("run")
    write_json(run_dir / "summary.json", summary)
    write_lines(run_dir / "metrics.jsonl", rows)
    write_lines(run_dir / "events.jsonl", [{"time": time, "kind": kind, "body": body} for body in bodies])

    assert "main" in page_of(run_dir).tags


@given(content=st.binary(max_size=60))
@settings(deadline=None)
def test_no_bytes_in_any_file_make_it_crash(tmp_path_factory, content):
    run_dir = tmp_path_factory.mktemp("run")
    for name in ("config.toml", "summary.json", "metrics.jsonl", "events.jsonl"):
        (run_dir / name).write_bytes(content)

    assert read_run(run_dir).notes
    page_of(run_dir)


CHECKS = {
    "in_doubt": True,
    "steps_believed": {"1": 150, "2": 190},
    "steps_in_doubt": [
        {"party": "worker-1", "stage": 1, "convicted_in": [104], "steps": [[1, 40], [42, 103]], "num_steps": 102}
        | {"last_verified": 41}
    ],
    "checkpoint_before_doubt": None,
    "checks": {
        stage: {"steps": 200, "messages": {"steps": 200, "last": 199}, "owner": {"steps": 3, "last": 160}}
        for stage in ("1", "2")
    },
    "drifts": [{"party": "worker-2", "stage": 2, "direction": "forward", "first_step": 9, "last_step": 31}],
}


def test_what_was_checked_and_what_is_in_doubt_is_drawn_and_said(run_dir):
    write_json(run_dir / "summary.json", {**SUMMARY, **CHECKS})

    page = page_of(run_dir)

    assert "Checks" in page.pieces
    assert "102 steps in doubt" in page.text
    assert "102 steps: 1 to 40, 42 to 103" in page.text
    assert "No earlier checkpoint is left" in page.text
    assert "160 (3 in all)" in page.text
    assert "stage 1 recomputed in full: 50" in page.text
    assert "stage 1 on its party's word: 48" in page.text
    assert "worker-2 2 forward 9 31" in page.text
    assert page.tags.count("svg") == 5


@pytest.mark.parametrize(
    "value", [None, 3, "x", [], {}, [1, {"steps": [[1], "a", [HOSTILE, 2]]}], {"1": {"steps": "x"}}]
)
@pytest.mark.parametrize("key", ["steps_believed", "steps_in_doubt", "checks", "drifts", "checkpoint_before_doubt"])
def test_a_summary_whose_checks_are_nonsense_is_drawn_as_far_as_it_goes(run_dir, key, value):
    write_json(run_dir / "summary.json", {**SUMMARY, **CHECKS, key: value})

    page = page_of(run_dir)

    assert "script" not in page.tags
    assert "Verdicts" in page.pieces


DRAWN = {"of": "weights", "name": "h.0.w", "low": -1.0, "high": 1.0, "counts": [0, 3, 4], "not_finite": 2}


def test_the_latest_histograms_are_drawn_a_row_for_each_parameter(run_dir):
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rows[-1]["histograms"] = [DRAWN, {**DRAWN, "of": "gradients", "low": 0.0, "not_finite": 0}]
    write_lines(run_dir / "metrics.jsonl", rows)

    page = page_of(run_dir)

    assert "h. 0. w -1 to 1, 2 not finite 0 to 1" in page.text
    assert ("aria-label", "-1 to 1, 2 not finite") in page.attributes


@pytest.mark.parametrize(
    "change",
    [{"counts": "many"}, {"counts": [-1, None, "x"]}, {"low": "a"}, {"name": [HOSTILE]}, {"of": {}}, {"counts": [0]}],
)
def test_odd_histograms_are_drawn_as_far_as_they_go(run_dir, change):
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rows[-1]["histograms"] = [{**DRAWN, **change}, 7, None]
    write_lines(run_dir / "metrics.jsonl", rows)

    assert "script" not in page_of(run_dir).tags
