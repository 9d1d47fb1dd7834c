"""A real worker process in hostile hands: it remembers one session in a file, and uses that in another one.

    python hostile_worker.py WORKER_FILE BOOK PLAN

Plans: `remember` is honest and writes down what it signs. `inputs` (in a commitment), `report`, `gradient`, `fault`,
`fetched`, `withhold` and `relay` show headers of the book in the place of genuine ones. `avoid` lies about
every message of its stage that the book does not know as audited.
"""

import functools
import json
import sys
from pathlib import Path

from phalanx.config import load_config
from phalanx.pipeline import WorkerConfig, leave_unwrapped, run_worker
from phalanx.pipeline.config import OWNER
from phalanx.pipeline.protocol.messages import (
    Activation,
    AuditReport,
    Commit,
    Fault,
    FetchBulk,
    FetchReply,
    GradientHeld,
    PassedOnHeader,
    Relay,
)
from phalanx.testing import Actor, RewritingEndpoint, tampering
from phalanx.testing.actor import OutgoingMessage

SINCE = 2
"""The step from which on it is hostile."""


REMEMBERED = Commit | GradientHeld | AuditReport | FetchReply | FetchBulk


def remember(book):
    """Write down what is sent, a line each."""

    def rewrite(outgoing):
        if isinstance(outgoing.message, REMEMBERED):
            line = [
                outgoing.message.kind,
                outgoing.message.model_dump(mode="json"),
                outgoing.receiver,
                outgoing.payload.hex(),
            ]
            with book.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        return [outgoing]

    return rewrite


def lines_of(book, kind):
    lines = [json.loads(line) for line in book.read_text(encoding="utf-8").splitlines()]
    return [(body, receiver, bytes.fromhex(payload)) for found, body, receiver, payload in lines if found == kind]


def said_in(book, kind):
    return [body for body, _, _ in lines_of(book, kind)]


def place_of(header):
    body = json.loads(header)["body"]
    return tuple(body[name] for name in ("step", "direction", "microbatch", "source"))


def show_inputs(book):
    """Commit to a neighbour's tensors of the session before."""
    past = {place_of(shown["header"]): shown for body in said_in(book, "commit") for shown in body["received"]}

    def rewrite(outgoing):
        message = outgoing.message
        if not isinstance(message, Commit) or message.step < SINCE:
            return [outgoing]
        shown = [past.get(place_of(signed.header)) for signed in message.received]
        return [
            outgoing.with_fields(
                {
                    "received": tuple(
                        signed if old is None or place_of(signed.header)[1] == "backward" else PassedOnHeader(**old)
                        for signed, old in zip(message.received, shown, strict=True)
                    )
                }
            )
        ]

    return rewrite


def show_gradient(book):
    """Say that the stage sent the weight gradient of the session before."""
    past = {(body["step"], body["stage"]): body for body in said_in(book, "gradient_held")}

    def rewrite(outgoing):
        message = outgoing.message
        if not isinstance(message, GradientHeld) or message.step < SINCE:
            return [outgoing]
        old = past[message.step, message.stage]
        parts = tuple(PassedOnHeader(**part) for part in old["parts"])
        return [
            outgoing.with_fields({"gradient": old["gradient"], "norm_squared": old["norm_squared"], "parts": parts})
        ]

    return rewrite


def show_report(book):
    """Report what a neighbour sent in the session before as the input of an audit."""
    past = {place_of(shown["header"]): shown for body in said_in(book, "audit_report") for shown in body["inputs"]}

    def rewrite(outgoing):
        message = outgoing.message
        if not isinstance(message, AuditReport) or message.step < SINCE:
            return [outgoing]
        shown = [past.get(place_of(signed.header)) for signed in message.inputs]
        inputs = tuple(
            signed if old is None or place_of(signed.header)[1] == "backward" else PassedOnHeader(**old)
            for signed, old in zip(message.inputs, shown, strict=True)
        )
        return [outgoing.with_fields({"inputs": inputs})]

    return rewrite


def complain(book):
    """Complain of a tensor that the neighbour did send, in the session before and in a shape that was right there."""
    headers = [shown for body in said_in(book, "commit") for shown in body["received"]]
    old = next(shown for shown in headers if place_of(shown["header"])[:3] == (SINCE, "forward", 0))
    about = json.loads(old["header"])["sender"]

    def rewrite(outgoing):
        message = outgoing.message
        if not isinstance(message, Commit) or message.step != SINCE:
            return [outgoing]
        fault = Fault(
            epoch=message.epoch, about=about, error="FrameError", reason="odd", evidence=PassedOnHeader(**old)
        )
        return [outgoing, OutgoingMessage(OWNER, fault)]

    return rewrite


def own_tensors(book):
    """Tensors that this worker sent forward in the session before and was asked for, by step and microbatch."""
    return {
        (body["step"], body["microbatch"]): (PassedOnHeader(**body["evidence"]), payload)
        for body, _, payload in lines_of(book, "fetched")
        if body["direction"] == "forward" and not body["claim"] and body["evidence"] is not None
    }


def answer(book):
    """Answer a request for a tensor with the one of the session before."""
    past = own_tensors(book)

    def rewrite(outgoing):
        message = outgoing.message
        place = (message.step, message.microbatch) if isinstance(message, FetchReply) else None
        if place not in past or message.claim or message.direction != "forward":
            return [outgoing]
        return [
            OutgoingMessage(outgoing.receiver, message.model_copy(update={"evidence": past[place][0]}), past[place][1])
        ]

    return rewrite


def withhold(book):
    """Withhold one tensor, and show the owner, which would hand it on, that of the session before."""
    past, shown = own_tensors(book), answer(book)
    place = min(place for place in past if place[0] >= SINCE)

    def rewrite(outgoing):
        message = outgoing.message
        if isinstance(message, Activation) and message.direction == "forward":
            return [] if (message.step, message.microbatch) == place else [outgoing]
        return shown(outgoing)

    return rewrite


def hand_on(book):
    """Hand the neighbour a tensor of the session before, as the owner does with what a link has lost."""
    past = own_tensors(book)

    def rewrite(outgoing):
        message = outgoing.message
        found = past.get((message.step, message.microbatch)) if isinstance(message, Activation) else None
        if found is None or message.direction != "forward" or message.step < SINCE:
            return [outgoing]
        place = {name: getattr(message, name) for name in ("epoch", "step", "microbatch", "direction", "source")}
        return [OutgoingMessage(outgoing.receiver, Relay(**place, evidence=found[0]), found[1]), outgoing]

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
    rewrites = {
        "remember": remember,
        "inputs": show_inputs,
        "report": show_report,
        "gradient": show_gradient,
        "fault": complain,
        "fetched": answer,
        "withhold": withhold,
        "relay": hand_on,
    }
    rewrite = rewrites[plan](book) if plan in rewrites else lambda outgoing: [outgoing]
    wrap = avoid(book) if plan == "avoid" else leave_unwrapped
    opener = functools.partial(RewritingEndpoint, actor=Actor(rewrite=rewrite))
    run_worker(load_config(worker_file, WorkerConfig), open_endpoint=opener, wrap_copy=wrap)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
