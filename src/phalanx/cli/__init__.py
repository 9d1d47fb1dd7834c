"""The command line: ``phalanx <verb>``, one file per verb; a verb imports its own modules only when it runs."""

from phalanx.cli.outcome import main as main, run_command as run_command
