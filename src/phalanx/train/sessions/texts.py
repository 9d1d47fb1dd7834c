"""A session that learns from texts: its batches, charged where rows are private, and its measurement."""

from phalanx.checkpoint.export import RunTokenizer
from phalanx.data import BatchLoader, ChatCorpus, Corpus
from phalanx.data.preferences import PairCorpus
from phalanx.models import ModelSource
from phalanx.train.batches.evaluations import SuiteEvaluator
from phalanx.train.batches.leak_meter import LeakMeter
from phalanx.train.batches.mixed import MixedLoader
from phalanx.train.batches.private import PrivateBatches, private_batches
from phalanx.train.batches.rewriting import rewrite_held_out, rewriting_of
from phalanx.train.batches.samples import TextSampler
from phalanx.train.config import DomainRun, PipelineRun
from phalanx.train.loop import Loader
from phalanx.train.sessions.context import SessionContext
from phalanx.train.sessions.factory import RunMaterial


def text_material(
    context: SessionContext[PipelineRun | DomainRun], source: ModelSource
) -> tuple[RunMaterial, PrivateBatches | None]:
    """Prepare the text of a run; the second is None where rows are not private."""
    run = context.run
    corpus = context.prepare_corpus(source)
    rewriting = rewriting_of(run, corpus)
    private = private_batches(run, corpus, context.log, context.history.charges, context.home.secrets_directory)
    further = context.prepare_further(source, corpus) if isinstance(corpus, Corpus) else ()
    loader: Loader
    if further and isinstance(corpus, Corpus):
        loader = MixedLoader.from_run(run, corpus, further)
    elif private is None:
        loader = BatchLoader(corpus, run.main_draws, run.train.seed, rewrite=rewriting)
    else:
        context.use_budget(private.ledger)
        loader = private.loader
    measured = [part for part in further if part.corpus.num_validation_sequences]
    named = {
        **context.validation_sets(source, corpus),
        **{part.name: part.corpus for part in measured if part.judge is None},
    }
    # the template of a chat, which exports get, may be that of a further objective
    templates = [
        one for one in (corpus, *(part.corpus for part in further)) if isinstance(one, ChatCorpus | PairCorpus)
    ]
    template = next((one for one in templates if one.template is not None), corpus)
    material = RunMaterial(
        source,
        rewrite_held_out(corpus, rewriting),
        loader,
        {name: rewrite_held_out(held_out, rewriting) for name, held_out in named.items()},
        TextSampler.from_run(run, corpus),
        corpus.vocabulary_digest,
        RunTokenizer.from_config(run.data.tokenizer, source, template),
        SuiteEvaluator.from_run(run, corpus.tokenizer_path, corpus.eos_id, context.home.path),
        LeakMeter.from_run(run, corpus) if isinstance(corpus, Corpus) else None,
        tuple(part for part in measured if part.judge is not None),
    )
    return material, private
