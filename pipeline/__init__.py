"""The order of the work: the Luigi graph.

    luigi --module pipeline PackCorpus --config corpus.yaml

Importing this package registers the tasks. It is the only one that imports luigi.
"""

from configparser import ConfigParser
from pathlib import Path

from luigi.configuration import get_config

# Luigi finds a luigi.cfg in the current folder only. Elsewhere it would look for a server for a minute, and a failed
# task would exit with 0; so what nobody has set is as in ours.
_ours = ConfigParser(interpolation=None)
_ours.read(Path(__file__).resolve().parent.parent / "luigi.cfg")
_central = any(
    get_config().has_option("core", f"{name}scheduler_{part}") for name in ("", "default_") for part in ("host", "url")
)
for _section in _ours.sections():
    for _option, _value in _ours[_section].items():
        if not get_config().has_option(_section, _option) and not (_central and _option == "local_scheduler"):
            get_config().set(_section, _option, _value)

from pipeline.graph import PackCorpus, PlanPacking, TokenizePart, TrainTokenizer, WriteShard  # noqa: E402

__all__ = ["PackCorpus", "PlanPacking", "TokenizePart", "TrainTokenizer", "WriteShard"]
