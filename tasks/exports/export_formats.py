"""List of all export formats. Import and add new formats here."""

from __future__ import annotations

from tasks.exports.formats.automodel import Automodel
from tasks.exports.formats.axolotl import Axolotl
from tasks.exports.formats.llama_factory import LlamaFactory
from tasks.exports.formats.mds import Mds
from tasks.exports.formats.megatron import Megatron
from tasks.exports.formats.olmo_core import OlmoCore
from tasks.exports.formats.trl import Trl
from tasks.exports.formats.xtuner import Xtuner
from tasks.exports.model import ExportFormat

EXPORTS: list[ExportFormat] = [
    Trl(),
    Megatron(),
    Axolotl(),
    LlamaFactory(),
    Xtuner(),
    OlmoCore(),
    Mds(),
    Automodel(),
]
