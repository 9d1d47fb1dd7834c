"""The process in which a chat template runs: ``python -m phalanx.data.chat.sandbox_process``.

The first order has the template, every further one a conversation. The process has a bounded amount of memory beside
its start, and of processor seconds for one order, after which the kernel ends it.
"""

import resource
from collections.abc import Iterator, Mapping
from datetime import date
from typing import Any

import jinja2

from phalanx.child import Message, answer_orders
from phalanx.data.chat.sandbox import SandboxedTemplate, TooMuchTextError, UnstableTemplateError

MEMORY_BYTES = 512 << 20

_FAULTS: tuple[tuple[type[BaseException], str], ...] = (
    (jinja2.exceptions.SecurityError, "forbidden"),
    (UnstableTemplateError, "unstable"),
    (TooMuchTextError, "too_much"),
    (MemoryError, "memory"),
    (jinja2.exceptions.TemplateError, "fails"),
    (TypeError, "fails"),
    (ValueError, "fails"),
    (ArithmeticError, "fails"),
    (LookupError, "fails"),
    (AttributeError, "fails"),
    (RecursionError, "fails"),
)


def main() -> None:
    """Answer orders until there are no more; the process also ends where the pipe to it is closed."""
    template: SandboxedTemplate | None = None
    seconds = 10

    def render_order(order: dict[str, Any], _: bytes) -> Iterator[Message]:
        nonlocal template, seconds
        seconds = order.get("seconds", seconds)
        _bound_time(seconds)
        answer: dict[str, Any] = {}
        try:
            if template is None:
                today = date.fromisoformat(order["today"])
                template = SandboxedTemplate(order["template"], order["variables"], today)
            else:
                answer = _answer_order(template, order)
        except tuple(kind for kind, _ in _FAULTS) as exc:
            answer = _describe_fault(exc)
        yield answer, b""

    answer_orders(render_order, MEMORY_BYTES)


def _answer_order(template: SandboxedTemplate, order: Mapping[str, Any]) -> dict[str, Any]:
    if order["asks"]:
        return {"text": template.render_text(order["messages"], order["tools"], asks=True), "spans": []}
    text, spans = template.render_turns(order["messages"], order["tools"], order["wanted"])
    return {"text": text, "spans": spans}


def _describe_fault(exc: BaseException) -> dict[str, Any]:
    kind = next(name for fault, name in _FAULTS if isinstance(exc, fault))
    location = f"line {exc.lineno}: " if isinstance(exc, jinja2.exceptions.TemplateSyntaxError) else ""
    return {"fault": kind, "says": f"{location}{exc}"[:300] or type(exc).__name__}


def _bound_time(seconds: int) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + seconds, hard))


if __name__ == "__main__":
    main()
