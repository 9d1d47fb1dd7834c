"""Faults that nobody expects: a server logs their kind and place, and not the text that they quote."""

import json
import logging
from typing import Annotated

import httpx2
import pytest
from pydantic import BaseModel, Field

from phalanx.serve.access import ListenConfig, RequestBounds, make_server
from phalanx.serve.engine import BadRequestError, batcher
from tiny_served import add_key, running_server, serve_model, write_model

MARKER = "quixotic-walrus"


class Small(BaseModel):
    """A body whose errors quote their input."""

    text: Annotated[str, Field(max_length=3)]


def make_fault(is_group: bool) -> Exception:
    try:
        try:
            Small(text=MARKER)
        except ValueError as exc:
            if not is_group:
                raise
            raise ExceptionGroup(MARKER, [ExceptionGroup(MARKER, [exc])]) from exc
    except (ValueError, ExceptionGroup) as exc:
        return exc


@pytest.mark.parametrize("name", ["uvicorn.error", "asyncio"])
@pytest.mark.parametrize("is_group", [False, True])
def test_a_fault_inside_is_logged_without_the_text_that_it_quotes(is_group, name):
    """A validation error quotes its input; uvicorn and asyncio log the errors that nobody catches with their traces."""
    make_server(None, ListenConfig(port=0), RequestBounds())
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(handler.format(record))
    logger = logging.getLogger(name)
    logger.addHandler(handler)
    try:
        logger.error("Exception in ASGI application\\n", exc_info=make_fault(is_group))
        logger.error("nothing but a message")
        logger.error("ASGI callable returned without completing response.")
    finally:
        logger.removeHandler(handler)

    assert lines[0].startswith("a request failed inside: ValidationError at ")
    assert "test_fault_log.py" in lines[0]
    assert MARKER not in lines[0]
    assert lines[1] == "nothing but a message"
    assert lines[2].startswith("an answer was cut: its key")


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    return serve_model(write_model(tmp_path_factory.mktemp("models")))


@pytest.mark.parametrize(("is_stream", "num_steps"), [(False, 0), (False, 2), (True, 0), (True, 2)])
@pytest.mark.parametrize(
    ("fault", "status", "kind"),
    [
        (RuntimeError(f"shape of {MARKER}"), 500, "RuntimeError"),
        (ValueError(f"cannot read {MARKER}"), 500, "ValueError"),
        (IndexError(MARKER), 500, "IndexError"),
        (BadRequestError(f"the grammar cannot go on: {MARKER}", "response_format"), 400, None),
    ],
)
def test_a_fault_while_a_text_is_written_leaves_no_word_of_it_in_the_log(
    fault, status, kind, is_stream, num_steps, served, tmp_path, caplog, monkeypatch
):
    """What a library or a grammar says of a fault may quote prompt, grammar or text."""

    steps = []
    run_step = batcher.run_step

    def fail(*arguments):
        steps.append(1)
        if len(steps) > num_steps:
            raise fault
        return run_step(*arguments)

    monkeypatch.setattr(batcher, "run_step", fail)
    _, secret = add_key(tmp_path / "access")
    body = {"model": "tiny", "messages": [{"role": "user", "content": "the"}], "max_tokens": 8}
    body |= {"stream": is_stream, "temperature": 0}
    with running_server([served], tmp_path / "access") as (url, _):
        headers = {"authorization": f"Bearer {secret}"}
        answer = httpx2.post(f"{url}/v1/chat/completions", json=body, headers=headers, trust_env=False, timeout=250)

    assert answer.status_code == (200 if is_stream and num_steps else status)
    assert MARKER not in caplog.text
    assert (MARKER in answer.text) == (kind is None)
    if kind is not None:
        assert f"{kind} at test_fault_log.py" in caplog.text
    lines = [line for file in (tmp_path / "access" / "log").iterdir() for line in file.read_text().splitlines()]
    assert MARKER not in "".join(lines)
    (request,) = [json.loads(line)["body"] for line in lines if json.loads(line)["kind"] == "request"]
    assert request["status"] == status
    assert bool(request["sizes"]) == bool(num_steps)
