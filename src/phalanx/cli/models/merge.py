"""``phalanx model merge`` and ``unmerge``: an adapter in a model's weights, and out of them again."""

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.answers.answer import Answer
from phalanx.cli.console import print_figures


def merge(
    base: Annotated[Path, typer.Argument(metavar="BASE", help="Model directory, in the hub's layout.")],
    adapter: Annotated[Path, typer.Argument(metavar="ADAPTER", help="Adapter directory, in peft's format.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New directory.")],
) -> Answer:
    """Add an adapter (LoRA, DoRA, rsLoRA) to a model's weights; the old weights are saved for unmerge."""
    from phalanx.checkpoint.merge import merge_adapter

    merged_facts = merge_adapter(base, adapter, out)
    print_figures(merged_facts)
    return Answer({"directory": out, **merged_facts})


def unmerge(
    merged: Annotated[Path, typer.Argument(metavar="MERGED", help="Directory that merge wrote.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New directory.")],
) -> Answer:
    """Restore the model before the merge, bit for bit, and compare its digest."""
    from phalanx.checkpoint.merge import unmerge_adapter

    unmerged_facts = unmerge_adapter(merged, out)
    print_figures(unmerged_facts)
    return Answer({"directory": out, **unmerged_facts})
