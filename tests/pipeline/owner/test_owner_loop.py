"""The owner has one loop: it alone handles messages, never inside a judge, and no judge can call it."""

import ast
import sys
from pathlib import Path

import pytest
from hand_made import run_task

import phalanx
from phalanx.lab.attacks import make_actor
from phalanx.pipeline import AttackConfig, GuardConfig
from phalanx.pipeline.protocol.needs import LoopTurn, OwnMail, owner_task
from phalanx.testing import tiny_run

SOURCE = Path(phalanx.__file__).parent
JUDGES = sorted((SOURCE / "pipeline" / "verify").glob("*.py")) + sorted((SOURCE / "pipeline" / "evidence").glob("*.py"))
DECIDING = ("pipeline/verify/", "pipeline/owner/", "pipeline/protocol/needs", "pipeline/protocol/requests")
MAX_FRAMES = 10


def stack_of(frame):
    """Our frames, outermost first, as (file, function); those of the simulation are left out."""
    found = []
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(SOURCE) and "testing" not in path.parts:
            found.append((str(path.relative_to(SOURCE)), frame.f_code.co_qualname))
        frame = frame.f_back
    return found[::-1]


class Watch:
    """Looks at the stack whenever the owner calls one of our functions."""

    def __init__(self):
        self.deepest = []
        self.handled = 0
        self.handled_in_a_judge = []

    def __call__(self, frame, event, arg):
        if event != "call" or not frame.f_code.co_filename.startswith(str(SOURCE)):
            return
        name = frame.f_code.co_qualname
        if name in ("EventLoop.run_turn", "ClaimRecorder.record_message"):
            stack = stack_of(frame)
            self.handled += name == "ClaimRecorder.record_message"
            above = stack[:-1]
            if any(
                file.startswith("pipeline/verify/") or "Coordinator.draw_conclusions" in called
                for file, called in above
            ):
                self.handled_in_a_judge.append(stack)
        path = frame.f_code.co_filename.removeprefix(f"{SOURCE}/")
        # what tensors and signatures take below a judge is no part of how deep it stands
        if path.startswith(DECIDING) and not name.endswith(">"):
            stack = [step for step in stack_of(frame) if not step[1].endswith(">")]
            # nor is what the recording of a message takes: no judge waits above it on the stack
            records = any("ClaimRecorder.record_message" in called for _, called in stack[:-1])
            if len(stack) > len(self.deepest) and not records:
                self.deepest = stack


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sign_flip", pytest.param("gradient_scale", marks=pytest.mark.slow)])
def test_while_a_verdict_is_found_the_stack_is_flat_and_no_message_is_handled_in_a_judge(make_company, kind):
    guard = GuardConfig(step_audit_rate=1.0, owner_audit_rate=1.0)
    liar = make_actor(AttackConfig(kind=kind, stages=(2,), from_step=0), "worker-2")
    company = make_company(tiny_run(guard=guard), {2: liar})
    watch = Watch()

    sys.setprofile(watch)
    try:
        company.run(1)
    finally:
        sys.setprofile(None)

    assert [verdict.party for verdict in company.verdicts] == ["worker-2"]
    assert watch.handled > 10
    assert watch.handled_in_a_judge == []
    assert 5 < len(watch.deepest) <= MAX_FRAMES, watch.deepest


def imported_by(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize("path", JUDGES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_judge_knows_neither_loop_nor_mailbox_nor_requests(path):
    source = path.read_text(encoding="utf-8")
    beneath = ("pipeline.owner", "protocol.mailbox", "protocol.requests", "protocol.relay", "transport.Endpoint")

    assert [name for name in imported_by(path) if any(part in name for part in beneath)] == []
    # the type of a callback into a loop: nothing goes in, nothing comes out
    assert "Callable[[], None]" not in source
    assert "Turn(" not in source


@pytest.mark.parametrize("path", sorted((SOURCE / "pipeline").rglob("*.py")), ids=lambda path: path.stem)
def test_nothing_in_the_pipeline_takes_a_callback_into_the_loop(path):
    held = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Attribute)]

    assert [node.attr for node in held if node.attr in ("pump", "_pump", "_courier", "is_gone")] == []
    # the loop itself, and the engine while it waits for a checkpoint's copies
    if path.name not in ("event_loop.py", "engine.py"):
        assert [node.attr for node in held if node.attr == "turn"] == []


def test_a_loop_does_not_run_inside_itself(make_company):
    company = make_company(tiny_run())
    loop = company.engine._loop

    @owner_task
    async def nested():
        loop.run_task(waiting())

    @owner_task
    async def waiting():
        await LoopTurn()

    with pytest.raises(RuntimeError, match="from inside itself"):
        loop.run_task(nested())

    assert loop.run_task(waiting()) is None


# --- tasks -----------------------------------------------------------------------------------------------------------


@owner_task
async def doubled(number):
    await OwnMail()
    return 2 * number


@owner_task
async def failing():
    await OwnMail()
    raise LookupError("nothing there")


@owner_task
async def asking(log):
    try:
        return await doubled(4)
    finally:
        log.append("cleared up")


def test_a_task_is_worth_what_the_one_that_it_awaits_returns():
    needs, log = [], []

    found = run_task(asking(log), needs.append)

    assert (found, log, [type(need) for need in needs]) == (8, ["cleared up"], [OwnMail])


def test_what_a_task_raises_reaches_the_one_that_awaits_it():
    @owner_task
    async def catching():
        try:
            await failing()
        except LookupError as exc:
            return str(exc)

    assert run_task(catching(), lambda need: None) == "nothing there"
    with pytest.raises(LookupError, match="nothing there"):
        run_task(failing(), lambda need: None)


def test_what_a_need_comes_to_grief_over_is_raised_where_it_was_awaited():
    log = []

    def broken(need):
        raise ConnectionError("no link")

    with pytest.raises(ConnectionError, match="no link"):
        run_task(asking(log), broken)

    assert log == ["cleared up"]


def test_tasks_that_await_each_other_do_not_deepen_the_stack():
    @owner_task
    async def deep(levels):
        return 0 if levels == 0 else 1 + await deep(levels - 1)

    assert run_task(deep(20_000), lambda need: None) == 20_000
