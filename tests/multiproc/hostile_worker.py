"""A real worker process in hostile hands: it remembers one session in a file, and uses that in another one.

    python hostile_worker.py WORKER_FILE BOOK PLAN

Plans: `remember` is honest and writes down what it signs; `inputs` and `gradient` show headers of the book in the
place of genuine ones; `avoid` lies about every message of its stage that the book does not know as audited.
"""

import functools
import json
import sys
from pathlib import Path

from phalanx.config import load_config
from phalanx.pipeline import WorkerConfig, run_worker, unwrapped
from phalanx.pipeline.messages import AuditReport, Commit, GradientHeld, Signed
from phalanx.testing import RewritingEndpoint, tampering

SINCE = 2
"""The step from which on it is hostile."""


def remember(book):
    """Write down what is sent, a line each."""

    def rewrite(letter):
        if isinstance(letter.message, Commit | GradientHeld | AuditReport):
            with book.open("a", encoding="utf-8") as file:
                file.write(json.dumps([letter.message.kind, letter.message.model_dump(mode="json")]) + "\n")
        return [letter]

    return rewrite


def said_in(book, kind):
    lines = [json.loads(line) for line in book.read_text(encoding="utf-8").splitlines()]
    return [body for found, body in lines if found == kind]


def place_of(header):
    body = json.loads(header)["body"]
    return tuple(body[name] for name in ("step", "direction", "microbatch", "source"))


def show_inputs(book):
    """Commit to a neighbour's tensors of the session before."""
    past = {place_of(shown["header"]): shown for body in said_in(book, "commit") for shown in body["received"]}

    def rewrite(letter):
        message = letter.message
        if not isinstance(message, Commit) or message.step < SINCE:
            return [letter]
        shown = [past.get(place_of(signed.header)) for signed in message.received]
        return [
            letter.saying(
                {
                    "received": tuple(
                        signed if old is None or place_of(signed.header)[1] == "backward" else Signed(**old)
                        for signed, old in zip(message.received, shown, strict=True)
                    )
                }
            )
        ]

    return rewrite


def show_gradient(book):
    """Say that the stage sent the weight gradient of the session before."""
    past = {(body["step"], body["stage"]): body for body in said_in(book, "gradient_held")}

    def rewrite(letter):
        message = letter.message
        if not isinstance(message, GradientHeld) or message.step < SINCE:
            return [letter]
        old = past[message.step, message.stage]
        parts = tuple(Signed(**part) for part in old["parts"])
        return [letter.saying({"gradient": old["gradient"], "norm_squared": old["norm_squared"], "parts": parts})]

    return rewrite


def avoid(book):
    """Lie where no audit fell in the session before, in the steps of which it is known where they fell."""
    audited = {(body["step"], body["microbatch"]) for body in said_in(book, "audit_report")}
    known = {step for step, _ in audited if step < max(audited)[0]}

    def tamper(direction, step, microbatch, tensor):
        lies = direction == "forward" and step in known and (step, microbatch) not in audited
        return -tensor if lies else tensor

    return tampering(tamper)


def main(worker_file, book, plan):
    """Run one worker."""
    rewrites = {"remember": remember, "inputs": show_inputs, "gradient": show_gradient}
    rewrite = rewrites[plan](book) if plan in rewrites else lambda letter: [letter]
    wrap = avoid(book) if plan == "avoid" else unwrapped
    opener = functools.partial(RewritingEndpoint, rewrite=rewrite)
    run_worker(load_config(worker_file, WorkerConfig), open_endpoint=opener, wrap_copy=wrap)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
