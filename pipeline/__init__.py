"""Run the work of a corpus in order: the Luigi graph.

    luigi --module pipeline PackCorpus --config corpus.yaml
    luigi --module pipeline TrainAdapter --config corpus.yaml
    luigi --module pipeline DiagnoseTraining --config corpus.yaml

Importing this package registers the tasks. No other package imports luigi.
"""

from packcorpus.tasks.core import startup  # noqa: F401 - before everything else

# isort: split
from packcorpus.pipeline import patches
from packcorpus.pipeline.graph import (
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

patches.install()
