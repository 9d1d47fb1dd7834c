"""Documents about a run for people and authorities: filled from its facts, blank where a person must answer."""

from phalanx.governance.forms.facts import read_documents as read_documents
from phalanx.governance.forms.filling import (
    FilledForm as FilledForm,
    FilledValue as FilledValue,
    fill_form as fill_form,
    form_names as form_names,
    load_template as load_template,
    render_form as render_form,
    write_forms as write_forms,
)
