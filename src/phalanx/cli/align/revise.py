"""``phalanx align revise``: answers that a model has criticised and written again by principles."""

from phalanx.cli.align.options import (
    Batch,
    Best,
    MaxNewTokens,
    Out,
    OwnCode,
    Principles,
    Prompts,
    Rounds,
    Seed,
    Temperature,
    Where,
    open_writer,
    print_found_figures,
)
from phalanx.cli.answers.answer import Answer


def revise(
    where: Where,
    *,
    principles: Principles,
    prompts: Prompts,
    out: Out,
    rounds: Rounds = 1,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = 0.8,
    seed: Seed = 0,
    batch: Batch = 8,
    best: Best = False,
    own_code: OwnCode = False,
) -> Answer:
    """Have a model answer prompts, criticise each answer by a drawn principle and write it again: conversations."""
    from phalanx.align import ResumableRows, Revision, load_constitution, read_prompts
    from phalanx.align.revision import revised_figures
    from phalanx.telemetry import row_bar

    constitution, asked = load_constitution(principles), read_prompts(prompts)
    writer = open_writer(where, max_new_tokens, temperature, best=best, own_code=own_code)
    loop = Revision(writer, constitution, asked, rounds=rounds, seed=seed)
    file = ResumableRows(out, loop.revision_lineage, batch)
    figures = file.read_lineage()
    if figures is None:
        with row_bar("prompts") as print_progress:
            rows = file.make_all(len(asked), loop.make_rows, print_progress)
        figures = file.finish_file(*revised_figures(rows))
    print_found_figures(out, figures)
    return Answer({"file": out, **figures})
