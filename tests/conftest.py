"""What holds for every test: no outside network, one torch thread, checked tensor shapes."""

import atexit
import contextlib
import gc
import ipaddress
import os
import shutil
import socket
import ssl
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from _pytest.assertion import rewrite
from hypothesis import settings
from jaxtyping import install_import_hook

if TYPE_CHECKING:
    from forked_commands import ForkedCommands

# before anything imports torch, transformers or grpc; child processes inherit it
os.environ.update({"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"})
# a run signs its shards with the user's key: tests have one of their own, the same in all processes of one session
if "PHALANX_TEST_HOME" not in os.environ:
    os.environ["PHALANX_TEST_HOME"] = os.environ["XDG_CONFIG_HOME"] = tempfile.mkdtemp(prefix="phalanx-tests-")
    atexit.register(shutil.rmtree, os.environ["PHALANX_TEST_HOME"], ignore_errors=True)

# of a hundred examples, which the slow shares draw (slow_shares.py)
settings.register_profile("quick", parent=settings.get_profile("ci"), max_examples=25)

pytest_plugins = ("slow_shares", "known_skips", "unseen_tests", "pytester")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Begin each test in the checkout, wherever an earlier one has left this process."""
    os.chdir(item.config.rootpath)


STATE_SHAPES = ("phalanx.objectives",)
"""Packages with shapes in their signatures; a test holds that there are no others."""

STATE_TYPES = ("phalanx.models", "phalanx.pipeline")
"""Packages with plain types alone, which mypy has proved; slow tests check them at run time too (ADR 69)."""

# shapes in signatures are checked here only: a run does not pay for it
install_import_hook(
    [*STATE_SHAPES, *(STATE_TYPES if os.environ.get("PHALANX_TEST_TYPES") == "all" else ())], "beartype.beartype"
)


class OutsideNetworkError(AssertionError):
    """A test tried to leave this machine."""


def _refuse_outside(family: int, address: Any) -> None:
    if family == socket.AF_UNIX:
        return
    host = str(address[0]).partition("%")[0]
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = host == "localhost"
    if not is_loopback:
        raise OutsideNetworkError(f"a test opened a connection to {host!r}; only loopback and unix are allowed")


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name bytes by their argument: gzip writes the time into them, and two test workers must agree on every name."""
    return argname if isinstance(val, bytes) else None


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Leave modules and tests, which live to the end, out of every search for garbage: each looked at a million."""
    if session.config.getoption("--hypothesis-profile", None) in ("quick", "ci"):
        _no_constants_of_sources()
    _compile_share(session.config)
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        # a search through all that torch and transformers have made takes a tenth of a second: after a million more
        # objects and not after seventy thousand
        gc.set_threshold(10_000, 10, 10)
        gc.enable()


def _compile_share(config: pytest.Config) -> None:
    """Compile every n-th test file of a new checkout, so that n test workers compile each once and not n times."""
    worker = getattr(config, "workerinput", None)
    if worker is None or config.option.file_or_dir or sys.dont_write_bytecode:
        return
    turn, num_workers = int(worker["workerid"].removeprefix("gw")), worker["workercount"]
    for path in sorted(Path(__file__).parent.rglob("test_*.py"))[turn::num_workers]:
        compiled = rewrite.get_cache_dir(path) / (path.stem + rewrite.PYC_TAIL)
        if rewrite.try_makedirs(compiled.parent) and not compiled.exists():
            # what does not parse is told by the collection
            with contextlib.suppress(SyntaxError):
                source_hash, code = rewrite._rewrite_test(path, config)
                rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, source_hash, compiled)


def _no_constants_of_sources() -> None:
    """Have hypothesis draw no constants that it reads out of our sources.

    It parses every module of ours that is loaded, which costs each test worker seconds, and examples would change with
    any line of them; `--hypothesis-profile=default` has it read them.
    """
    providers = sys.modules.get("hypothesis.internal.conjecture.providers")
    if providers is not None and hasattr(providers, "_get_local_constants"):
        providers._get_local_constants = lambda: providers._local_constants


@pytest.fixture(scope="session", autouse=True)
def no_power_cut() -> Iterator[None]:
    """Wait for no disk: what is flushed there outlives a power cut, which no test has, and a test writes many times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def only_loopback() -> Iterator[None]:
    """Refuse every connection of this process that leaves the machine."""
    connect, connect_ex = socket.socket.connect, socket.socket.connect_ex

    def guarded_connect(self: socket.socket, address: Any) -> None:
        _refuse_outside(self.family, address)
        connect(self, address)

    def guarded_connect_ex(self: socket.socket, address: Any) -> int:
        _refuse_outside(self.family, address)
        return connect_ex(self, address)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", guarded_connect)
        patch.setattr(socket.socket, "connect_ex", guarded_connect_ex)
        yield


PUBLIC_AUTHORITIES = ("/etc/ssl/", "/etc/pki/", ssl.get_default_verify_paths().openssl_cafile)


@pytest.fixture(scope="session", autouse=True)
def no_public_authorities() -> Iterator[None]:
    """Read no public certificates: every server of a test is on this machine, and each HTTP client would parse 140."""
    load = ssl.SSLContext.load_verify_locations

    def load_own(self: ssl.SSLContext, cafile: Any = None, capath: Any = None, cadata: Any = None) -> None:
        if not str(cafile).startswith(PUBLIC_AUTHORITIES):
            load(self, cafile, capath, cadata)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl.SSLContext, "load_verify_locations", load_own)
        yield


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator["ForkedCommands"]:
    """One server of this session, from which commands, workers and ranks are forked with all imports done."""
    from forked_commands import ForkedCommands

    commands = ForkedCommands(tmp_path_factory.mktemp("forked_commands"))
    yield commands
    commands.close()


@pytest.fixture(autouse=True)
def one_torch_thread() -> None:
    """Give torch one thread, so that results do not depend on the machine; torch is not imported for it."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
