"""Faults that nobody expects: a server logs their kind and place, and not the text that they quote."""

import logging
from typing import Annotated

import pytest
from pydantic import BaseModel, Field

from phalanx.serve.access import ListenConfig, RequestBounds, make_server

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


@pytest.mark.parametrize("is_group", [False, True])
def test_a_fault_inside_is_logged_without_the_text_that_it_quotes(is_group):
    """A validation error quotes its input, and uvicorn logs with their traces the errors that nobody catches."""
    make_server(None, ListenConfig(port=0), RequestBounds())
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(handler.format(record))
    logger = logging.getLogger("uvicorn.error")
    logger.addHandler(handler)
    try:
        logger.error("Exception in ASGI application\\n", exc_info=make_fault(is_group))
        logger.error("nothing but a message")
    finally:
        logger.removeHandler(handler)

    assert lines[0].startswith("a request failed inside: ValidationError at ")
    assert "test_fault_log.py" in lines[0]
    assert MARKER not in lines[0]
    assert lines[1] == "nothing but a message"
