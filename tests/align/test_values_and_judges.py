"""Values that disagree are shown with amounts; a judge behind a server says A or B, or is refused."""

import http.server
import json
import threading
from typing import ClassVar

import pytest

from phalanx.align import JudgeFile, ServerJudge, value_gaps
from phalanx.align.values import read_pairs
from phalanx.config import load_config
from phalanx.errors import ConfigError, DataError, RewardError
from phalanx.rewards import RewardsConfig, RewardScorer


@pytest.fixture
def values(tmp_path):
    of = [
        {"kind": "pattern", "pattern": "please", "name": "manners", "weight": 0.5},
        {"kind": "pattern", "pattern": "^.{0,8}$", "name": "brevity", "weight": 2.0},
    ]
    config = RewardsConfig.model_validate_json(json.dumps({"of": of}))
    with RewardScorer(config, tmp_path, tmp_path / "rewards.log") as found:
        yield found


def test_a_conflict_is_a_pair_on_which_two_values_have_opposed_opinions(values, tmp_path):
    path = tmp_path / "pairs.jsonl"
    rows = [
        {"prompt": "a", "chosen": "yes please do come", "rejected": "come"},
        {"prompt": [{"role": "user", "content": "b"}], "chosen": "please", "rejected": "a long answer"},
        {"prompt": "c", "chosen": "nothing of the kind", "rejected": "a long answer"},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    found = value_gaps(read_pairs(path), values, 0.0)

    assert found["accuracy"] == {"manners": pytest.approx(5 / 6), "brevity": 0.5}
    assert found["disagreement"] == {"manners / brevity": pytest.approx(1 / 3)}
    (conflict,) = found["conflicts"]
    assert (conflict["prompt"], conflict["gaps"], conflict["sum"]) == ("a", {"manners": 1.0, "brevity": -1.0}, -1.5)
    assert value_gaps(read_pairs(path), values, 1.0)["conflicts"] == []


def test_a_line_that_is_no_pair_is_refused(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"prompt": "a", "chosen": "b"}\n')

    with pytest.raises(DataError, match='line 1: field "rejected" holds None, expected text'):
        read_pairs(path)


class Replies(http.server.BaseHTTPRequestHandler):
    """Says what the question asks it to."""

    asked: ClassVar[list[str]] = []

    def do_POST(self):
        question = json.loads(self.rfile.read(int(self.headers["content-length"])))["messages"][0]["content"]
        self.asked.append(question)
        self.send_response(500 if question == "break" else 200)
        self.end_headers()
        said = {"choices": [{"message": {"content": question}}]} if question != "odd" else {"choices": []}
        self.wfile.write(b"<html>" if question == "page" else json.dumps(said).encode())

    def log_message(self, *_):
        """Say nothing."""


@pytest.fixture(scope="module")
def judge():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Replies)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield JudgeFile.model_validate_json(
        json.dumps({"judge": {"kind": "server", "url": f"http://127.0.0.1:{server.server_port}/v1", "model": "m"}})
    ).judge
    server.shutdown()
    server.server_close()


def test_a_server_says_a_or_b(judge):
    assert [ServerJudge(judge).first_probability(said) for said in ("A", "B", " (a)\n", "**B**.")] == [
        1.0,
        0.0,
        1.0,
        0.0,
    ]


@pytest.mark.parametrize("said", ["A or B", "both", "", "break", "odd", "page"])
def test_anything_else_is_refused_with_what_to_do(judge, said):
    with pytest.raises(RewardError, match="finished rows are reused") as caught:
        ServerJudge(judge).first_probability(said)

    assert caught.value.error_facts["code"] == "PHX-R042"
    assert "http://127.0.0.1" in str(caught.value)


def test_a_server_that_is_down_is_refused(judge):
    gone = judge.model_copy(update={"url": "http://127.0.0.1:9/v1"})

    with pytest.raises(RewardError, match="Connection refused"):
        ServerJudge(gone).first_probability("A")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "judge: missing"),
        ('[judge]\nkind = "oracle"', "expected one of"),
        ('[judge]\nkind = "server"\nurl = "file:///etc/passwd"\nmodel = "m"', "judge.server.url"),
        ('[judge]\nkind = "rewards"\nof = []', "at least 1"),
    ],
)
def test_a_broken_file_of_a_judge_is_refused(tmp_path, text, told):
    path = tmp_path / "judge.toml"
    path.write_text(text)

    with pytest.raises(ConfigError) as caught:
        load_config(path, JudgeFile)

    assert told in str(caught.value)
