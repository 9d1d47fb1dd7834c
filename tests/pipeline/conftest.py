import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from phalanx.pipeline import AuditDraw, GuardConfig, StepPlan
from phalanx.pipeline.protocol.greetings import KernelDigests
from phalanx.pipeline.stage.kernel_fingerprint import fingerprint_kernels
from phalanx.pipeline.stage.stage_copy import WrapCopy, leave_unwrapped
from phalanx.testing import Actor, CompanySession, MemoryCompany, tiny_run
from phalanx.train import PipelineRun

MakeCompany = Callable[..., MemoryCompany]
PLAIN = (leave_unwrapped, Actor().kernels)
USUAL_STEPS = 4
"""Most tests compare the weights after two, three or four steps of the same run."""


@pytest.fixture(scope="session")
def batteries() -> Callable[..., KernelDigests]:
    """Run the battery of a plan once for all parties with plain kernels, which in one process compute the same bits.

    All companies of a plan are measured with the first one's nonce; `test_admission.py` runs the battery itself.
    """
    nonces: dict[str, str] = {}
    known: dict[str, KernelDigests] = {}
    lock = threading.Lock()

    def run_once(plan: StepPlan, nonce: str, kernels: WrapCopy = leave_unwrapped) -> KernelDigests:
        # of the guard a battery takes the classes alone, which say in what precision an update is made
        guard = GuardConfig(mode="off", classes=plan.guard.classes)
        key = plan.model_copy(update={"run_digest": "", "guard": guard}).model_dump_json()
        with lock:
            first = nonces.setdefault(key, nonce)
            if kernels not in PLAIN:
                return fingerprint_kernels(plan, first, kernels)
            if key not in known:
                known[key] = fingerprint_kernels(plan, first)
            return known[key]

    return run_once


@pytest.fixture(autouse=True)
def one_battery_of_a_plan(batteries: Callable[..., KernelDigests], monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure the kernels of parties in threads once; those in processes of their own see nothing of it."""
    monkeypatch.setattr("phalanx.pipeline.membership.admission.fingerprint_kernels", batteries)
    monkeypatch.setattr("phalanx.pipeline.worker.process.fingerprint_kernels", batteries)


@pytest.fixture(scope="session")
def model_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def make_company(tmp_path_factory: pytest.TempPathFactory, model_cache: Path) -> Iterator[MakeCompany]:
    """Make companies with actors that are given by stage; ends them all."""
    with ExitStack() as stack:

        def make(
            run: PipelineRun | None = None,
            actors: Mapping[int, Actor] | None = None,
            draw: AuditDraw | None = None,
            session: str = "simulation-1",
        ) -> MemoryCompany:
            named = {f"worker-{stage}": actor for stage, actor in (actors or {}).items()}
            directory = tmp_path_factory.mktemp("run")
            company = MemoryCompany(
                run or tiny_run(), directory, named, cache=model_cache, draw=draw, session=CompanySession(session)
            )
            return stack.enter_context(company)

        yield make


@pytest.fixture(scope="session")
def honest_digest(tmp_path_factory: pytest.TempPathFactory, model_cache: Path) -> Callable[[PipelineRun, int], str]:
    """Tell the weights after so many steps of an honest, unguarded run; each run is trained once."""
    known: dict[str, list[str]] = {}

    def digest(run: PipelineRun, num_steps: int) -> str:
        guard = GuardConfig(mode="off", classes=run.guard.classes)
        # how long anybody waits is in no bit of an undisturbed run
        pipeline = run.pipeline.model_copy(update={"patience_s": 30.0, "step_timeout_s": 30.0})
        bare = run.model_copy(update={"guard": guard, "pipeline": pipeline})
        key = bare.model_dump_json()
        if num_steps > len(known.get(key, ())):
            known[key] = []
            with MemoryCompany(bare, tmp_path_factory.mktemp("honest"), cache=model_cache) as company:
                for _ in range(max(num_steps, USUAL_STEPS)):
                    company.run(1)
                    known[key].append(company.weights_digest())
        return known[key][num_steps - 1]

    return digest
