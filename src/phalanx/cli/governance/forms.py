"""``phalanx forms``: documents about a run, filled from its facts."""
from phalanx.cli.answers.answer import Answer
FORMS_EPILOG="Example: phalanx forms runs/first"
def forms() -> Answer:
    """Stub."""
    return Answer({})
