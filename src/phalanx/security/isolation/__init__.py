"""The `process` tier: a program in a sandbox that keeps out other users, NOT root and not the machine's owner.

`start_isolated` runs a Python module in a process of its own, behind namespaces, Landlock and seccomp, without rights,
and says of every measure whether it holds; one that cannot be had stops the program before its first line.
Loads the standard library only, since the child imports it before it is confined.
"""

from phalanx.security.isolation.report import LABEL as LABEL, IsolationReport as IsolationReport, Measure as Measure
from phalanx.security.isolation.sandbox import Program as Program, Sandbox as Sandbox
from phalanx.security.isolation.start import IsolatedProcess as IsolatedProcess, start_isolated as start_isolated
