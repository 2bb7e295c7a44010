"""The order of the work: the Luigi graph.

    luigi --module pipeline PackCorpus --config corpus.yaml

Importing this package registers the tasks. It is the only one that imports luigi.
"""

from pipeline import settings
from pipeline.graph import PackCorpus, PlanPacking, TokenizePart, TrainTokenizer, WriteShard

__all__ = ["PackCorpus", "PlanPacking", "TokenizePart", "TrainTokenizer", "WriteShard"]

settings.apply()
