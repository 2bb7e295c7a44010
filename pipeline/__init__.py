"""The order of the work: the Luigi graph.

    luigi --module pipeline PackCorpus --config corpus.yaml
    luigi --module pipeline TrainAdapter --config corpus.yaml

Importing this package registers the tasks. It is the only one that imports luigi.
"""

from tasks.core import startup  # before all else

# isort: split
from pipeline import command_line_errors, run_guard, settings
from pipeline.graph import PackCorpus, PlanPacking, TokenizePart, TrainAdapter, TrainTokenizer, WriteShard

__all__ = ["PackCorpus", "PlanPacking", "TokenizePart", "TrainAdapter", "TrainTokenizer", "WriteShard"]

settings.apply()
command_line_errors.use_own_exit_codes()
command_line_errors.tell_unknown_options()
run_guard.follow_forks()
startup.is_over()
