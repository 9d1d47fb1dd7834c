"""Starts an isolated victim and waits to be killed: ``python -m isolation_starter TELL_FD HOLD_FD``."""

import os
import sys

from phalanx.security.isolation import Program, Sandbox, start_isolated

if __name__ == "__main__":
    tell, hold = sys.argv[1:]
    running = start_isolated(Program("isolation_victim", (tell, hold), (int(tell), int(hold))), Sandbox())
    os.close(int(tell))
    running.wait()
