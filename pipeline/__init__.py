"""Run the stages in order: the Luigi graph.

    luigi --module pipeline PackCorpus --config corpus.yaml
    luigi --module pipeline TrainAdapter --config corpus.yaml
    luigi --module pipeline DiagnoseTraining --config corpus.yaml

Importing this package registers the tasks. No other package imports luigi.
"""

from tasks.core import startup  # before everything else

# isort: split
from pipeline import settings
from pipeline.graph import (
    DiagnoseTraining,
    PackCorpus,
    PlanPacking,
    TokenizePart,
    TokenizeParts,
    TrainAdapter,
    TrainTokenizer,
    WriteShard,
    WriteShards,
)
from pipeline.run_guard import guard

__all__ = [
    "DiagnoseTraining",
    "PackCorpus",
    "PlanPacking",
    "TokenizePart",
    "TokenizeParts",
    "TrainAdapter",
    "TrainTokenizer",
    "WriteShard",
    "WriteShards",
]

settings.apply()
guard.install()
startup.end()
