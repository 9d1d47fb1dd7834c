"""Models for edge devices: GGUF and ONNX, each opened again and compared before it is handed out."""

from typing import TYPE_CHECKING

from phalanx.late_names import late_names

if TYPE_CHECKING:
    from phalanx.edge.comparison import CheckSizes as CheckSizes, Difference as Difference, render_table as render_table
    from phalanx.edge.export import (
        CHECKED as CHECKED,
        NOT_CHECKED as NOT_CHECKED,
        PRECISIONS as PRECISIONS,
        export_edge as export_edge,
    )
    from phalanx.edge.statement import (
        STATEMENT_FILE as STATEMENT_FILE,
        ExportOrigin as ExportOrigin,
        compare_run as compare_run,
        compare_source as compare_source,
        verify_statement as verify_statement,
    )

# the helper process that opens a file loads no torch
if not TYPE_CHECKING:
    __getattr__ = late_names(__name__)
