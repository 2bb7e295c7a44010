"""Check that a rendering has each trained turn, whole and in its place.

    rendering ─▶ located? ─▶ in {% generation %} blocks? ─▶ content, reasoning, and calls written? ─▶ ranges

Each check raises Reject. If the first conversations of a corpus all fail alike, it is the template, and the run stops
(see tokenization/checks.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from tasks.conversations.model import Conversation, Message
from tasks.core.errors import Reject
from tasks.core.printable import shown
from tasks.encoders.encoder import Encoder
from tasks.templates.jinja.breaker import escaped
from tasks.templates.jinja.engines.requests import Rendering
from tasks.templates.jinja.expected_forms import ExpectedForms
from tasks.templates.jinja.turns.flagged import Range
from tasks.templates.jinja.turns.locate import Located, is_written
from tasks.templates.placeholders import JSON_GAP
from tasks.templates.reasoning import ReasoningForm, reasoning_of, without_reasoning


class Labels:
    """Checks for the renderings of one template."""

    def __init__(self, name: str, encoder: Encoder, forms: ExpectedForms):
        self._name, self._controls, self._forms = name, encoder.control_pattern, forms

    def require_located(
        self, rendering: Rendering, conversation: Conversation, start: str, breaker: str, every: bool = False
    ) -> None:
        """Check that every turn was located.

        `start` describes the text that a turn should continue. `every` is true if every message is trained on, not
        because of a flag.
        """
        if rendering.lost is None:
            return
        k, problem = rendering.lost
        role = conversation.messages[k].role
        if role != "assistant" and not every:
            raise Reject(
                "flag_not_followed",
                f"messages[{k}] ({role}) has a flag that adds it to the trained turns, but the template {self._name} "
                f"does not separate it: {problem}",
            )
        raise Reject(
            "turn_not_located",
            f"messages[{k}] ({role}) cannot be located, because its rendering by the template {self._name} does not "
            f"continue {start}: {problem.replace(escaped(breaker), '')}",
        )

    def ranges_of(
        self, sample: Located, conversation: Conversation, marks: Sequence[Range] | None, breaker: str
    ) -> list[Range]:
        """Return the trained ranges of a located sample, in order and without overlap.

        `marks` are the {% generation %} blocks of the whole rendering; None if the template has none.
        """
        text, ranges, turn, turns, _, flagged = sample
        for k, (start, stop) in zip(turns, ranges, strict=not flagged):
            if turn is None and marks is not None:
                self._require_marked(text, k, (start, stop), marks, breaker)
            self._require_written(conversation.messages[k], k, text[start:stop], breaker)
        return _in_order([*ranges, *flagged])

    def _require_marked(self, text: str, k: int, located: Range, marks: Sequence[Range], breaker: str) -> None:
        """Check that blocks hold what the model writes in a turn.

        White space and the control token at the end may be outside. A block may begin in the prompt, and end after the
        turn; this text is not trained on.
        """
        start, stop = located
        left_out, place = [], start
        for first, last in marks:
            if first < stop and last > start:
                left_out.append(text[place : max(first, place)])
                place = max(last, place)
        end = next((match.start() for match in self._controls.finditer(text, place, stop) if match.end() == stop), stop)
        left_out.append(text[place:end])
        if missing := next((part for part in left_out if part.strip()), None):
            raise Reject(
                "turn_not_located",
                f"messages[{k}] cannot be located, because the model writes {shown(missing.replace(breaker, ''))} "
                f"after its prompt, and no {{% generation %}} block of the template {self._name} has this text; mark "
                "all that the model writes, or remove the marks",
            )

    def _require_written(self, message: Message, k: int, answer: str, breaker: str) -> None:
        """Check that the template wrote a turn, its reasoning, and its calls.

        A text that the template never writes may be in the answer by chance, so finding it is not enough.
        """
        if message.content.strip() and not self._has_text(answer):
            raise Reject(
                "answer_not_written", f"messages[{k}] has content, but the template {self._name} does not write it"
            )
        if not reasoning_of(message) and not message.tool_calls:
            return
        answer = JSON_GAP.sub("\0\\1\0", answer.replace(breaker, ""))
        never = self._forms.reasoning is ReasoningForm.NONE and bool(message.reasoning)
        never = never and not (message.tool_calls and self._forms.reasons_before_calls)
        self.require_reasoning(message, k, answer, never)
        for call in message.tool_calls:
            if self._forms.calls is None or not is_written(call.name, answer):
                what = "tool calls" if self._forms.calls is None else "this call, although it writes others"
                raise Reject(
                    "calls_not_written",
                    f"messages[{k}] calls {call.name!r}, but the template {self._name} does not write {what}; use a "
                    "template that does",
                )

    def require_reasoning(self, message: Message, k: int, answer: str, never: bool = False) -> None:
        """Check that a text has the reasoning of a message.

        If `never`, the template does not write it. Raises Reject.
        """
        reasoning = reasoning_of(message)
        if not reasoning:
            return
        # The content may have the same words as the reasoning.
        content = without_reasoning(message).content.strip()
        head, found, tail = answer.rpartition(content) if content else (answer, "", "")
        others = [head + "\0" + tail, answer.replace(content, "\0", 1)] if found else [answer]
        if never or not any(is_written(reasoning, other) for other in others):
            if self._forms.written_reasoning:
                raise Reject(
                    "reasoning_left_out",
                    f"messages[{k}] has reasoning, but the template {self._name} does not write it here, although it "
                    "writes reasoning elsewhere; remove it, set `train: false` in the message, or `reasoning: drop`",
                )
            raise Reject(
                "reasoning_not_written",
                f"messages[{k}] has reasoning, but the template {self._name} does not write it; set `reasoning: drop`, "
                "or use a template that writes reasoning",
            )

    def _has_text(self, answer: str) -> bool:
        """Return whether an answer has text other than white space and controls."""
        start = answer.lstrip()
        if start and not self._controls.match(start):
            return True
        return bool(self._controls.sub("", answer).strip())


def _in_order(ranges: list[Range]) -> list[Range]:
    """Return ranges in ascending order, each without the part that an earlier one has."""
    ordered: list[Range] = []
    for start, stop in sorted((start, stop) for start, stop in ranges):
        ordered.append((max([start, *(end for _, end in ordered[-1:])]), stop))
    return ordered
