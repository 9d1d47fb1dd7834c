"""The owner of a split with an enclave and clients of other owners: it calls, coordinates, and sees no text."""

import contextlib
from collections.abc import Callable, Iterator

from phalanx.split.channel import turn_messages as ask
from phalanx.split.channel.connection import Aside, Connection
from phalanx.split.channel.message import SplitMessage
from phalanx.split.config import ENCLAVE
from phalanx.split.roles.remote_lead import RemoteLead
from phalanx.train.config import SplitRun
from phalanx.train.records.run_directory import RunDirectory
from phalanx.train.sessions.enclave_call import EnclaveCall, call_enclave
from phalanx.train.sessions.remote_stacks import RemoteStacks
from phalanx.train.sessions.split_cluster import enclave_of, num_pair_sums_of, party_of

Say = Callable[[str], None]


@contextlib.contextmanager
def remote_company(
    run: SplitRun, home: RunDirectory, num_classes: int, tell: Say, clients: Aside = lambda message: False
) -> Iterator[RemoteLead]:
    """Call the enclave, wait for it and for all clients, and end the run of all of them when it is complete.

    Args:
        run: Needs ``split.remote_clients``.
        num_classes: Number of classes of a classification; 0 of a language model.
        clients: Takes reports on clients: their evidence, and refusals by admission.
    """
    split = run.split
    names = ", ".join(split.client_names)
    tell(f"calling the enclave at {split.remote_enclave} and waiting for {names}, at most {split.step_timeout_s:g} s")
    call = EnclaveCall(home.owner, split.remote_enclave or "", split.transport, split.step_timeout_s, say=tell)
    with call_enclave(call, enclave_of(home)) as called, contextlib.ExitStack() as stack:
        addresses = dict.fromkeys(split.client_names, call.enclave)
        stacks = RemoteStacks(home.owner, split.transport, home.path, addresses, through=ENCLAVE)
        stack.enter_context(stacks)
        stack.push(lambda kind, *_: stacks.ask_after_failure(kind, split.client_names))
        watch = WaitNotice(split.step_timeout_s, tell, stacks.ask_in_background)

        def aside(message: SplitMessage) -> bool:
            return watch.take_waiting(message) or clients(message)

        connection = Connection(called.endpoint, ENCLAVE, split.step_timeout_s, called.look, aside)
        owner, num_sums = party_of(run, home, home.owner, connection, called.session), num_pair_sums_of(run)
        lead = RemoteLead(split, owner, num_classes, num_sums)
        stack.callback(lead.close)
        lead.meet_enclave()
        yield lead
        lead.end_session()


class WaitNotice:
    """What the owner tells people while a turn waits for a client.

    Args:
        timeout_s: After so long the run ends.
        ask: Takes the name of each client that a turn waits for.
    """

    def __init__(self, timeout_s: float, tell: Say, ask: Say) -> None:
        self._timeout_s, self._tell, self._ask = timeout_s, tell, ask

    def take_waiting(self, message: SplitMessage) -> bool:
        """Take word of clients that a turn waits for; False for any other message."""
        if not isinstance(message, ask.AwaitedClients):
            return False
        for name in message.names:
            self._ask(name)
        self._tell(
            f"waiting for {', '.join(message.names)}; after {self._timeout_s:g} s (split.step_timeout_s) the run "
            "ends with exit code 4, and --resume continues from the last checkpoint"
        )
        return True
