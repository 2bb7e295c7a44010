"""The order of the work: the Luigi graph.

    luigi --module pipeline PackCorpus --config corpus.yaml
    luigi --module pipeline TrainAdapter --config corpus.yaml

Importing this package registers the tasks. It is the only one that imports luigi.
"""

from tasks.core import startup  # before all else

# isort: split
from pipeline import exits, settings, signals
from pipeline.graph import PackCorpus, PlanPacking, TokenizePart, TrainAdapter, TrainTokenizer, WriteShard

__all__ = ["PackCorpus", "PlanPacking", "TokenizePart", "TrainAdapter", "TrainTokenizer", "WriteShard"]

settings.apply()
exits.use_own_exit_codes()
exits.tell_unknown_options()
signals.follow_forks()
startup.is_over()
