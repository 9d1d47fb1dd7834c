"""The process in which a chat template runs: ``python -m phalanx.data.chat.sandbox_process``, a JSON object a line.

The first line has the template, every further one a conversation; each is answered by a line. The process has a bounded
amount of memory beside its start, and of processor seconds for one line, after which the kernel ends it.
"""

import json
import resource
import sys
from collections.abc import Mapping
from datetime import date
from typing import Any

import jinja2

from phalanx.child import bound_memory
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
    """Answer lines until there are no more."""
    bound_memory(MEMORY_BYTES)
    template: SandboxedTemplate | None = None
    seconds = 10
    for request in sys.stdin:
        _bound_time(seconds)
        try:
            order = json.loads(request)
            if template is None:
                seconds = order["seconds"]
                template = _template(order)
                answer: Mapping[str, Any] = {}
            else:
                answer = _rendered(template, order)
        except tuple(kind for kind, _ in _FAULTS) as exc:
            answer = _fault(exc)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _template(order: Mapping[str, Any]) -> SandboxedTemplate:
    return SandboxedTemplate(order["template"], order["variables"], date.fromisoformat(order["today"]))


def _rendered(template: SandboxedTemplate, order: Mapping[str, Any]) -> Mapping[str, Any]:
    if order["asks"]:
        return {"text": template.text(order["messages"], order["tools"], asks=True), "spans": []}
    text, spans = template.turns(order["messages"], order["tools"], order["wanted"])
    return {"text": text, "spans": spans}


def _fault(exc: BaseException) -> Mapping[str, Any]:
    kind = next(name for fault, name in _FAULTS if isinstance(exc, fault))
    location = f"line {exc.lineno}: " if isinstance(exc, jinja2.exceptions.TemplateSyntaxError) else ""
    return {"fault": kind, "says": f"{location}{exc}"[:300] or type(exc).__name__}


def _bound_time(seconds: int) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + seconds, hard))


if __name__ == "__main__":
    main()
