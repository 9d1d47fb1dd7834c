"""Models for edge devices: GGUF and ONNX, each opened again and compared before it is handed out."""

from typing import TYPE_CHECKING

from phalanx.late_names import late_names

if TYPE_CHECKING:
    from phalanx.edge.comparison import CheckSizes as CheckSizes, Difference as Difference
    from phalanx.edge.export import (
        NOT_CHECKED as NOT_CHECKED,
        PRECISIONS as PRECISIONS,
        EdgeExport as EdgeExport,
        export_edge as export_edge,
    )

# the helper process that opens a file loads no torch
if not TYPE_CHECKING:
    __getattr__ = late_names(__name__)
