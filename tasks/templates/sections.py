"""Choose which sections of answers are trained on: reasoning, content, and calls.

    <think>\\n6 × 7\\n</think>\\n\\n │ I look it up.\\n │ <tool_call>\\n{"name": …}\\n</tool_call><|im_end|>
    reasoning                       content            calls

A section begins with the markup before its text. White space between two sections and a marker that closes the first
one belong to the first one. The end of the turn belongs to its last section. An empty block of reasoning is a section
too. All sections stay in the row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from packcorpus.tasks.core.printable import counted

if TYPE_CHECKING:
    from packcorpus.tasks.encoders.encoder import Encoder


class TrainParts(BaseModel):
    """Parts of an answer that are trained on."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    reasoning: bool = Field(default=True, description="Its reasoning, with the markers around it.")
    content: bool = Field(default=True, description="Its content.")
    calls: bool = Field(default=True, description="Its tool calls, with the markers around them.")


class Sections(NamedTuple):
    """The sections of answers that are trained on.

    `empty` is true if empty blocks of reasoning are trained on like other reasoning.
    """

    reasoning: bool = True
    content: bool = True
    calls: bool = True
    empty: bool = True


ALL_SECTIONS = Sections()

# If a larger share of the answers closes the reasoning at once, a line says so.
NOTEWORTHY = 0.01

# Why a conversation is rejected if a label would change its tokens.
CROSSED = "train_parts or empty_reasoning needs a label that changes within a token of an answer"


def splits(encoder: Encoder, left: str, right: str) -> bool:
    """Return whether two texts have the same tokens together and apart."""
    if not left or not right:
        return True
    if left.endswith(encoder.space_follows):
        return False
    encoded = encoder.encode([left + right, left, right])
    start, middle, _, end = encoded.offsets.tolist()
    ids = encoded.ids.tolist()
    return bool(ids[start:middle] == ids[middle:end])


def sections_of_config(config: Mapping[str, Any]) -> Sections:
    """Return the sections that a recorded config chooses."""
    return Sections(**config.get("train_parts", {}), empty=config.get("empty_reasoning") != "mask")


def explain_sections(sections: Sections) -> str:
    """Return a phrase that names the sections that are left out, or nothing."""
    names = [name for name in ("reasoning", "content", "calls") if not getattr(sections, name)]
    names += ["empty blocks of reasoning"] * (sections.reasoning and not sections.empty)
    return f", without {' and '.join(names)}" if names else ""


def check_sections(train_on: str, sections: Sections, weighted: bool, overlong: str) -> None:
    """Raise ValueError if a setting excludes the choice of sections.

    `weighted` is true if turns have loss weights of the data.
    """
    if sections == ALL_SECTIONS:
        return
    name = "train_parts" if sections._replace(empty=True) != ALL_SECTIONS else "empty_reasoning"
    if train_on == "all":
        raise ValueError(
            f"{name} and train_on: all cannot be set together: all of the text is trained on; remove {name}, or set "
            "train_on: assistant, last, or rounds"
        )
    if not (sections.reasoning or sections.content or sections.calls):
        raise ValueError("train_parts: reasoning, content, and calls are all false; keep one of them")
    if overlong == "turns" and not (sections.content and sections.calls):
        left_out = "calls" if sections.content else "content"
        raise ValueError(
            f"train_parts: {{{left_out}: false}} and overlong: turns cannot be set together: the trained text of a "
            "turn does not end where the turn ends; set overlong: truncate, drop, or split"
        )
    if weighted and sections.reasoning and sections.calls and not sections.content:
        raise ValueError(
            "train_parts: {content: false} and loss weights of the data cannot be set together: the weight of a turn "
            "is for one run of trained text; also leave out reasoning or calls, or set loss_weight: none"
        )


def explain_empty_blocks(noticed: Mapping[str, Any], sections: Sections, where: str = "") -> list[str]:
    """Return a line about empty blocks of reasoning that a template writes.

    `noticed` has the counts of answers. The list is empty if such answers are rare, or if the blocks are not trained
    on. `where` follows the count.
    """
    closed, reasoned = noticed.get("empty_reasoning", 0), noticed.get("reasoned_answers", 0)
    if closed <= NOTEWORTHY * (closed + reasoned) or not (sections.reasoning and sections.empty):
        return []
    answers = counted(closed, "trained answer")
    return [
        f"{answers}{where} close{'s' * (closed == 1)} the reasoning at once, and {reasoned:,} "
        f"{'has' if reasoned == 1 else 'have'} reasoning. The model learns the empty block that the template writes "
        "for answers without reasoning; to prevent this, set  advanced: {empty_reasoning: mask}"
    ]
