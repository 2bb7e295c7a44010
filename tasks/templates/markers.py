"""Find markers of a template like control tokens that its tokenizer lacks.

    <|im_end|>  <｜User｜>  <end_of_turn>  <|turn>  </s>  [TOOL_CALLS]      look like control tokens
    <|user|>  [INST]                    tokens of some tokenizers, and text for others: Zephyr, OLMo, Llama 2, Mistral 1
    <think>  <tool_call>  <tools>  <<SYS>>  ### Response:                  text, which some tokenizers have as a token

The markers of a template for another model are spelled in letters, and so the model learns turns that no server writes.
A marker of the first kind is therefore an error if a conversation is written with it. One of the second kind is an
error only for a template that also has markers of the first kind in the same style, as Mistral has since version 3. The
markers around a sample, such as <|endoftext|>, do not count for this.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

from packcorpus.tasks.core.printable import printable
from packcorpus.tasks.encoders.encoder import Encoder, Unencodable

_OF_MISTRAL = r"\[/?(?:[A-Z]+(?:_[A-Z]+)+|THINK|ARGS|IMG)\]"
_LIKE_CONTROL = re.compile(
    "|".join(
        (
            r"<\|[^\s<>|]{1,40}\|>|<｜[^\s<>｜]{1,40}｜>|\[\|[^\s|\[\]]{1,40}\|\]",
            r"<\|[a-z_]{2,40}>|<[a-z_]{2,40}\|>",  # Gemma 4
            r"</?(?:\w+:)?(?:s|bos|eos|pad|unk|sep|cls|mask|sop|eop)>",
            r"<(?:start|begin|end)_of_\w+>|<(?:extra_id|SPECIAL|reserved|unused)_?\d+>",
            rf"\[/?INST\]|{_OF_MISTRAL}|\[(?:gMASK|BOS|EOS|PAD|UNK|SEP|CLS|MASK)\]",
            r"\[e~\[|\]~!?b[\[\]]",  # MiniMax
        )
    )
)
# Text for the tokenizers of some models: names of roles, and the markers of Llama 2.
_ROLES = "system|developer|user|human|prompter|assistant|bot|gpt|model|chatbot|tool|function|observation|context"
_SOMETIMES = re.compile(rf"<\|(?:{_ROLES})\|>|\[\|(?:{_ROLES})\|\]|\[/?INST\]")

SHOWN = 8  # markers to name in an error


class UnknownMarkers(NamedTuple):
    """Markers of a template that its tokenizer lacks.

    One of `alone` is enough for an error; `others` are only named with it.
    """

    alone: tuple[str, ...] = ()
    others: tuple[str, ...] = ()

    def within(self, texts: Iterable[str]) -> tuple[str, ...]:
        """Return the markers in texts that are an error alone."""
        if not self.alone:
            return ()
        joined = "\0".join(texts)
        return tuple(marker for marker in self.alone if marker in joined)

    def __or__(self, other: UnknownMarkers) -> UnknownMarkers:
        return UnknownMarkers(*(tuple(dict.fromkeys(both)) for both in map(chain, self, other)))


def find_unknown_markers(source: str, encoder: Encoder, own_text: str = "") -> UnknownMarkers:
    """Find the markers in the source of a template that a tokenizer lacks.

    Markers in `own_text`, which the config adds to conversations, are content.
    """
    markers = dict.fromkeys(_LIKE_CONTROL.findall(source))
    missing = [marker for marker in markers if marker not in own_text and not _is_token(marker, encoder)]
    # OLMo has <|endoftext|> beside <|user|>, which is text. A tokenizer may have no BOS: its ID is None.
    ends = {encoder.bos_id, encoder.eos_id, encoder.pad_id} - {None}
    always = [m for m in markers if not _SOMETIMES.fullmatch(m) and encoder.controls.get(m) not in ends]
    styles = {_style(marker) for marker in always}
    alone = [marker for marker in missing if marker in always or _style(marker) in styles]
    return UnknownMarkers(tuple(alone), tuple(marker for marker in missing if marker not in alone))


def _style(marker: str) -> str:
    """Return what markers of one style share: <|, [|, or [ (Mistral)."""
    if marker[1] == "|":
        return marker[:2]
    return "[" if re.fullmatch(rf"{_OF_MISTRAL}|\[/?INST\]", marker) else marker


def _is_token(marker: str, encoder: Encoder) -> bool:
    try:
        return encoder.is_token(marker) or len(encoder.encode([marker]).ids) == 1
    except Unencodable:
        return False


def explain_unknown(template: str, markers: Sequence[str], tokenizer: str) -> str:
    """Return the error for markers that a template wrote into a conversation."""
    names = [printable(marker) for marker in markers[:SHOWN]]
    names += [f"{len(markers) - SHOWN:,} more"] * (len(markers) > SHOWN)
    *first, last = names
    listed = f"{', '.join(first)} and {last}" if first else last
    return (
        f"the template {template} writes {listed} like control tokens, but the tokenizer {tokenizer} has no such "
        "tokens, and would spell each in letters; the template is probably that of another model: set `template: "
        "tokenizer`, or name the tokenizer of the template's model; if the markers are meant to be text, set  "
        "advanced: {unknown_markers: text}"
    )
