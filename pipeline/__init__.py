"""Run the work of a corpus in order: the Luigi graph.

    luigi --module pipeline PackCorpus --config corpus.yaml
    luigi --module pipeline TrainAdapter --config corpus.yaml
    luigi --module pipeline DiagnoseTraining --config corpus.yaml

Importing this package registers the tasks. No other package imports luigi.
"""

import sys

if __name__ == "packcorpus.pipeline":
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
else:  # by the name that luigi imports
    from pkgutil import extend_path

    # A folder `pipeline` of a user, without an __init__.py, would otherwise be hidden by this package.
    __path__ = [*(path for path in extend_path(__path__, __name__) if path not in __path__), *__path__]
    if "luigi" in sys.modules:
        from packcorpus.pipeline import *  # noqa: F403
