"""A served model is scored and asked over the server's own API, with the figures of the model itself."""

import http.server
import json
import threading

import pytest

from phalanx.errors import ConfigError, ModelError, RewardError
from phalanx.evaluate import LocalScorer, open_suite, run_suites
from phalanx.evaluate.scorer import WritingRule
from phalanx.evaluate.server_scorer import ServerScorer, ServerWriter, open_tokenizer
from phalanx.rewards.server import ServerSettings
from phalanx.serve import TextModel
from tiny_served import add_key, running_server, serve_model, write_model


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    directory = write_model(tmp_path_factory.mktemp("models"))
    access = tmp_path_factory.mktemp("serve") / "access"
    key = tmp_path_factory.mktemp("key") / "key"
    key.write_text(add_key(access)[1])
    with running_server([serve_model(directory)], access) as (url, _):
        settings = ServerSettings(url=f"{url}/v1", model="tiny", key_file=key)
        yield directory, settings, ServerWriter(settings, is_chat=True)


def test_figures_are_those_of_the_model_itself(served):
    directory, _, writer = served
    backend, prefix, length = open_tokenizer(directory)
    assert length == 1024
    suites = [open_suite(name, limit=4) for name in ("prose", "facts", "bias-pairs")]

    over_http = run_suites("s", ServerScorer(writer, backend, prefix, 257, 3), suites, 0)
    local = run_suites("l", LocalScorer(TextModel(directory), window=256), suites, 0)

    for name, figure in local.figures.items():
        assert over_http.figures[name].value == pytest.approx(figure.value, rel=1e-4), name
    assert over_http.model["system_fingerprint"].startswith("phx_")
    assert over_http.model["model_digest"] is None


def test_texts_and_chats_are_written_by_the_server(served):
    _, _, writer = served
    rule = WritingRule(max_new_tokens=5)

    assert writer.write_texts(["the and", "in"], rule) == writer.write_texts(["the and", "in"], rule)
    assert len(writer.write_texts(["the and"], rule, chat=True)) == 1


def test_a_wrong_key_and_a_missing_model_are_told(served, tmp_path):
    _, settings, _ = served
    (tmp_path / "wrong").write_text("no key")
    with pytest.raises(RewardError, match="HTTP 401"):
        writer = ServerWriter(settings.model_copy(update={"key_file": tmp_path / "wrong"}), is_chat=False)
        writer.write_texts(["the"], WritingRule())
    with pytest.raises(ConfigError, match="cannot be read"):
        ServerWriter(settings.model_copy(update={"key_file": tmp_path / "none"}), is_chat=False)
    with pytest.raises(ModelError, match="no tokenizer"):
        open_tokenizer(tmp_path)


ANSWERS = [
    "[]",
    "null",
    "{}",
    '{"choices": 3}',
    '{"choices": []}',
    '{"choices": [3]}',
    '{"choices": [{}]}',
    '{"choices": [{"text": 3}]}',
    '{"choices": [{"logprobs": {"token_logprobs": [], "top_logprobs": []}}]}',
    '{"choices": [{"logprobs": {"token_logprobs": [null,"x","y"], "top_logprobs": [null,{},{}]}}]}',
    '{"choices": [{"logprobs": {"token_logprobs": [null,NaN,NaN], "top_logprobs": [null,{},{}]}}]}',
    '{"choices": [{"logprobs": {"token_logprobs": [null,5.0,5.0], "top_logprobs": [null,{},{}]}}]}',
    '{"choices": [{"logprobs": {"token_logprobs": [null,-1,-1], "top_logprobs": [null,{"a":"b"},{"a":"b"}]}}]}',
    '{"choices": [{"logprobs": {"token_logprobs": [null,-1,-1], "top_logprobs": [null,{"a":-1,"b":"c"},{}]}}]}',
    '{"choices": [{"logprobs": {"token_logprobs": [null,-1,-1], "top_logprobs": [null,{"a":null,"b":-1},{}]}}]}',
    '{"choices": [{"logprobs": {"token_logprobs": [null,-1,-1], "top_logprobs": [null,{"a":[],"b":-1},{}]}}]}',
    f'{{"choices": [{{"logprobs": {{"token_logprobs": [null,-{"9" * 400},-1], "top_logprobs": [null,{{}},{{}}]}}}}]}}',
    '{"choices": [{"logprobs": {"token_logprobs": [null,false,false], "top_logprobs": [null,{},{}]}}]}',
    "[" * 100_000,
    "<html>",
]


@pytest.fixture
def liar():
    """A server of an attacker: whatever is asked, it gives the answer of the test."""
    answer = [b""]

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-length", str(len(answer[0])))
            self.end_headers()
            self.wfile.write(answer[0])

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1", answer
    server.shutdown()
    thread.join()
    server.server_close()


def test_answers_of_a_lying_server_are_refused_and_no_traceback(served, liar):
    directory, _, _ = served
    url, answer = liar
    backend, prefix, _ = open_tokenizer(directory)
    writer = ServerWriter(ServerSettings(url=url, model="m"), is_chat=False)
    scorer = ServerScorer(writer, backend, prefix, 64, 1)
    # an answer of the right form is taken, so each of the others is refused for what is wrong in it
    answer[0] = b'{"choices": [{"logprobs": {"token_logprobs": [null,-1,-1], "top_logprobs": [null,{"a":-1},{}]}}]}'
    assert scorer.score_endings([("a", "b")])[0].log_prob in (-1.0, -2.0)
    for content in ANSWERS:
        answer[0] = content.encode()
        with pytest.raises(RewardError):
            scorer.score_endings([("a", "b")])
    for content in [text for text in ANSWERS if "logprobs" not in text and text != '{"choices": [{}]}']:
        answer[0] = content.encode()
        with pytest.raises(RewardError):
            writer.write_texts(["a"], WritingRule())


def test_a_fingerprint_is_cut_and_text_of_any_length_is_data(served, liar):
    url, answer = liar
    writer = ServerWriter(ServerSettings(url=url, model="m"), is_chat=False)
    text = "\x1b[2J" * 100_000
    answer[0] = json.dumps({"choices": [{"text": text}], "system_fingerprint": "f" * 10_000}).encode()

    assert writer.write_texts(["a"], WritingRule()) == [text]
    assert len(writer.describe_model()["system_fingerprint"]) == 80
