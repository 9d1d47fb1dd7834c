"""Incidents of a server: out of service at once, back to a certified checkpoint, a signed report, and exercises."""

from typing import TYPE_CHECKING

from phalanx.late_names import late_names

if TYPE_CHECKING:
    from phalanx.serve.incident.case import IncidentCase as IncidentCase, newest_case as newest_case
    from phalanx.serve.incident.certified import CertifiedModel as CertifiedModel, find_certified as find_certified
    from phalanx.serve.incident.exercise import ExerciseResult as ExerciseResult, exercise_playbook as exercise_playbook
    from phalanx.serve.incident.playbook import Playbook as Playbook, read_playbook as read_playbook
    from phalanx.serve.incident.report import verify_report as verify_report, write_report as write_report


if not TYPE_CHECKING:
    __getattr__ = late_names(__name__)
