"""Find the forms in which a template reads reasoning, tool calls, and contents.

    an answer in each form ─render─▶ the forms that the template writes ─expected─▶ messages in these forms

Templates differ in what they read: reasoning in a field or in the content, arguments as objects or as JSON text, and
contents as text or as lists of parts. A template does not say what it reads, so it renders a few answers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cached_property
from itertools import product
from typing import Any

from packcorpus.tasks.conversations.answers import REASONING_KEYS
from packcorpus.tasks.conversations.model import Message, as_openai, in_parts
from packcorpus.tasks.core.errors import Reject
from packcorpus.tasks.templates.adjust import ReasoningForm, is_ambiguous, knows_developer, with_reasoning
from packcorpus.tasks.templates.jinja.renderer import Renderer
from packcorpus.tasks.templates.jinja.rendering import Job

# Templates that search the content for reasoning split it at the end marker, or test for this marker.
_READS_INLINE = re.compile(r"""split\(\s*['"]</?think>|['"]</think>['"]\s+in\b""")

# The message before the answers, an answer, and one with reasoning.
_QUESTION = {"role": "user", "content": "a"}
_ANSWER = {"role": "assistant", "content": "b"}
_REASONED = {**_ANSWER, "reasoning_content": "r-e-a-s-o-n"}

_SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "description": "a"}}, "required": ["a"]}
_TOOL = {"type": "function", "function": {"name": "other", "description": "a", "parameters": _SCHEMA}}


def _call(null_content: bool, text_arguments: bool) -> dict[str, Any]:
    arguments = {"a": "b"}
    function = {"name": "t-o-o-l", "arguments": json.dumps(arguments) if text_arguments else arguments}
    call = {"type": "function", "id": "callabcde", "function": function}
    return {"role": "assistant", "content": None if null_content else "", "tool_calls": [call]}


class ExpectedForms:
    """The forms that a template reads with some options, found when needed."""

    def __init__(self, source: str, renderer: Renderer, options: Mapping[str, Any] | None = None):
        self._source, self._renderer, self._options = source, renderer, options
        self._reads_lists: dict[str, bool] = {}
        self.knows_developer = knows_developer(source)
        # Most templates read `reasoning_content`. That of gpt-oss reads `thinking`, and Gemma 4 also `reasoning`.
        self._fields = tuple(key for key in REASONING_KEYS[1:] if re.search(rf"\b{key}\b", source))

    def expected(self, message: Message) -> dict[str, Any]:
        """Return a message in OpenAI's form, as the template reads it.

        A content of several parts is a list of their texts if the template reads lists, for `in_parts`.
        """
        found = as_openai(message)
        found["role"] = self.role_of(message)
        if message.role == "assistant":
            # The template may separate reasoning itself that would be moved to the field.
            is_moved = self.reasoning is ReasoningForm.FIELD and not message.reasoning
            if not (is_moved and is_ambiguous(message.content) and self._separates_inline):
                found = with_reasoning(found, self.reasoning, self._fields)
            if message.tool_calls and self.calls is not None:
                null_content, text_arguments = self.calls
                if null_content and not found["content"]:
                    found["content"] = None
                if text_arguments:
                    for call, written in zip(message.tool_calls, found["tool_calls"], strict=True):
                        written["function"]["arguments"] = call.arguments
        if message.parts and found["content"] == "\n".join(message.parts) and self.reads_lists(found["role"]):
            found["content"] = [*message.parts]
        return found

    def role_of(self, message: Message) -> str:
        """Return the role of a message as the template reads it."""
        return message.given_role if self.knows_developer else message.role

    def reads_lists(self, role: str) -> bool:
        """Return whether the template writes the parts of a content that is a list.

        It depends on the role of the message. A template that writes the list itself, such as `{{ message.content }}`,
        writes quotes around texts.
        """
        if role not in self._reads_lists:
            texts = ["f-i-r-s-t", "s-e-c-o-n-d"]
            others = (_QUESTION, _ANSWER, _call(*self.calls or (False, False)))
            question, answer, call = (in_parts(m) if self.reads_parts else m for m in others)
            message = in_parts({"role": role, "content": texts})
            if role == "tool":
                message |= {"name": "t-o-o-l", "tool_call_id": "callabcde"}
            messages = {"user": [message, answer], "assistant": [question, message], "tool": [question, call, message]}
            text = self._text_of(*messages.get(role, [message, question, answer]))
            self._reads_lists[role] = all(re.search(rf"{part}(?!['\"])", text) for part in texts)
        return self._reads_lists[role]

    @cached_property
    def reads_parts(self) -> bool:
        """Return whether the template writes only contents that are lists of parts."""
        answer, other = ({"role": "assistant", "content": content} for content in ("a-n-s-w-e-r", "o-t-h-e-r-s"))
        if self._text_of(_QUESTION, answer) != self._text_of(_QUESTION, other):
            return False
        return "a-n-s-w-e-r" in self._text_of(in_parts(_QUESTION), in_parts(answer))

    @cached_property
    def written_reasoning(self) -> ReasoningForm | None:
        """Return the form in which the template writes reasoning after a question.

        The template is rendered with each form, and must write the reasoning. Return None if it does not.
        """
        for form in (ReasoningForm.FIELD, ReasoningForm.INLINE):
            if form is ReasoningForm.INLINE and not _READS_INLINE.search(self._source):
                continue  # it would write the reasoning like any other content
            if "r-e-a-s-o-n" in self._trial(_REASONED, form):
                return form
        return None

    @cached_property
    def reasoning(self) -> ReasoningForm:
        """Return the form in which the template reads reasoning."""
        # Some prompts open the reasoning, and the template leaves the reasoning out of the turn (see `locate`).
        guess = ReasoningForm.FIELD if _READS_INLINE.search(self._source) else ReasoningForm.NONE
        return self.written_reasoning or guess

    @cached_property
    def _separates_inline(self) -> bool:
        return self._trial(_REASONED, ReasoningForm.FIELD) == self._trial(_REASONED, ReasoningForm.INLINE)

    @cached_property
    def calls(self) -> tuple[bool, bool] | None:
        """Return the form in which the template writes tool calls.

        The two flags are true if the content must be null, and if arguments must be JSON text. Return None if the
        template writes no calls.
        """
        for tools, text_arguments, null_content in product((None, [_TOOL]), (False, True), (False, True)):
            if "t-o-o-l" in self._trial(_call(null_content, text_arguments), ReasoningForm.NONE, tools):
                return null_content, text_arguments
        return None

    @cached_property
    def reasons_before_calls(self) -> bool:
        """Return whether the template writes reasoning in turns with calls."""
        call = {**_call(*self.calls or (False, False)), "reasoning_content": "r-e-a-s-o-n"}
        return "r-e-a-s-o-n" in self._trial(call, ReasoningForm.FIELD)

    def _trial(self, answer: dict[str, Any], form: ReasoningForm, tools: Any = None) -> str:
        messages = _QUESTION, with_reasoning(answer, form, self._fields)
        return self._text_of(*(map(in_parts, messages) if self.reads_parts else messages), tools=tools)

    def _text_of(self, *messages: dict[str, Any], tools: Any = None) -> str:
        """Return the rendering of messages; "" if the template refuses them."""
        try:
            return self._renderer.render(Job([*messages], tools, False, [], "others", options=self._options)).text
        except Reject:
            return ""
