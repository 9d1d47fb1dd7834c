"""The paper's three transports among real parties: each worker is a process, and tensors cross sockets."""

from phalanx.lab.reproduce.parties.initiator import PartyProcesses as PartyProcesses
from phalanx.lab.reproduce.parties.initiator import RealParties as RealParties
from phalanx.lab.reproduce.parties.settings import DEFENCES as DEFENCES
from phalanx.lab.reproduce.parties.settings import PaperRun as PaperRun
from phalanx.lab.reproduce.parties.settings import PaperSettings as PaperSettings
from phalanx.lab.reproduce.parties.settings import load_paper_run as load_paper_run
