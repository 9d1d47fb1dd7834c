"""A program to run in a sandbox, and the sandbox's rules."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from phalanx.security.isolation.report import Measure


@dataclass(frozen=True)
class Program:
    """A Python module that is run as ``python -m`` would.

    It stays in the process that was confined: a program that is started by exec could be read again by processes of the
    same user.

    Attributes:
        module: Importable where it is started from.
        arguments: Its command line; other processes of the machine can see it.
        inherited: File descriptors that it keeps, under their numbers: sockets, open files.
        environment: Variables beside the ones that Python needs; the parent's environment is not inherited.
    """

    module: str
    arguments: tuple[str, ...] = ()
    inherited: tuple[int, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Sandbox:
    """The files that a sandboxed program may reach beside its inherited descriptors: no network, process or program.

    Attributes:
        readable: Files and directories that it may read; Python's own and what `python_needs` names come along.
        writable: Directories, files and devices that it may read, write, make and remove; of a GPU its device files.
        unsafe_without: Measures that may be lacking. The program then starts on machines that cannot give them, and the
            report says so.
    """

    readable: tuple[str, ...] = ()
    writable: tuple[str, ...] = ()
    unsafe_without: tuple[Measure, ...] = ()

    @property
    def required_measures(self) -> tuple[Measure, ...]:
        """Measures without which nothing is run."""
        return tuple(measure for measure in Measure if measure not in self.unsafe_without)


@dataclass(frozen=True)
class SandboxArguments:
    """The arguments of the child, on its command line; none of them is secret.

    Attributes:
        starter: Process id of the process that waits for it.
        report_fd: File descriptor for the report.
    """

    program: Program
    sandbox: Sandbox
    starter: int
    report_fd: int

    def to_text(self) -> str:
        """Write it as JSON; the environment is handed over as such and left out."""
        plain = asdict(self)
        plain["program"]["environment"] = {}
        return json.dumps(plain)

    @classmethod
    def from_text(cls, text: str) -> "SandboxArguments":
        """Read what `to_text` wrote."""
        plain = json.loads(text)
        program, sandbox = plain["program"], plain["sandbox"]
        return cls(
            Program(program["module"], tuple(program["arguments"]), tuple(program["inherited"])),
            Sandbox(
                tuple(sandbox["readable"]),
                tuple(sandbox["writable"]),
                tuple(Measure(measure) for measure in sandbox["unsafe_without"]),
            ),
            plain["starter"],
            plain["report_fd"],
        )
