"""Chat templates: what a prompt lacks, and how few samples hold every turn.

    messages, tools ─render─▶ texts ─lost─▶ parts of the conversation that a prompt lacks: it must be rejected
                                    ─least─▶ the smallest number of samples
                                    ─sample─▶ one sample as text, which `tokens` encodes

`render` returns the text of messages, with or without the generation prompt, as Transformers does. Everything is
rendered again and compared as a whole, so this is only for small conversations. The rules:

- The prompt of turn k is the rendering of messages[:k] with the generation prompt. The answer is what the rendering of
  messages[:k + 1] adds to it, or to its header if the template changes earlier messages; white space after the last
  control token is not part of it.
- A rendering R of messages[:m], or of a prompt with its answer, may train turn k if R begins with the prompt of k and
  continues with its answer. Ids before the turn are those of inference: one text from the last control token on. Ids
  of the turn are its own.
- Each prompt has every message, call, argument, result, and tool before it, and each answer has its own texts.
  Reasoning of earlier turns may be left out, and so may the ids of calls.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import combinations
from typing import Any

from reference.families import Messages, Sample, Tools, mark
from reference.tokens import Library, encoded

Render = Callable[[Messages, Tools, bool], str]
Path = tuple[int | str, ...]  # the keys and indexes of a value

PROBE = "q7z"  # in no text of a test
SCHEMA = ("type", "format", "required", "additionalProperties")  # what templates may translate


def turns_in_chatml(text: str) -> list[str]:
    """Return each turn of the assistant in one rendering.

    It is the text after its header, through its end token. No text of the conversation may have a marker.
    """
    return [found[1] for found in re.finditer(r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)", text, re.DOTALL)]


class Rendered:
    """A conversation with a template. `turns` are the indexes of its trained answers."""

    def __init__(self, messages: Messages, tools: Tools, turns: Sequence[int], render: Render, library: Library):
        self.messages = [{key: value for key, value in each.items() if key != "train"} for each in messages]
        self.tools, self.turns, self._render, self.library = tools, turns, cache_of(render), library
        self._controls = re.compile("|".join(map(re.escape, library.controls)))

    # -- prompts and answers

    def text(self, count: int, prompt: bool = False) -> str:
        return self._render(self.messages[:count], self.tools, prompt)

    def prompt(self, k: int) -> str:
        return self.text(k, True)

    def answer(self, k: int) -> str:
        return self._answer(self.messages, self.tools, k)

    def _answer(self, messages: Messages, tools: Tools, k: int) -> str:
        alone, prompt = self._render(messages[: k + 1], tools, False), self._render(messages[:k], tools, True)
        if alone.startswith(prompt):
            answer = alone[len(prompt) :]
        else:
            header = prompt.removeprefix(self._render(messages[:k], tools, False))
            found = header != prompt and header in alone
            assert found, "no rule for the answers of this template"
            answer = alone.rpartition(header)[2]
        last = max((found.end() for found in self._controls.finditer(answer)), default=0)
        return answer[:last] if last and not answer[last:].strip() else answer

    # -- nothing of the prompt is lost

    def lost(self) -> list[int]:
        """Return the index of each message of which a trained turn lacks a part.

        The index of the tools is -1.
        """
        return sorted(
            {number for k in self.turns for number, *part in self._parts(k) if not self._is_written(k, number, *part)}
        )

    def _parts(self, k: int) -> Iterator[tuple[int, Path, str]]:
        """Yield the message, the path, and the text of each part that turn k must have."""
        for path, text in parts_of(self.tools):
            yield -1, path, text
        for number, message in enumerate(self.messages[: k + 1]):
            said = ["content", "reasoning_content"] if number == k else ["content"]
            places: list[Path] = [(key,) for key in said if key in message]
            for call in range(len(message.get("tool_calls", ()))):
                places += [("tool_calls", call, "function", key) for key in ("name", "arguments")]
            for place in places:
                for path, text in parts_of(value_at(message, place), place):
                    yield number, path, text

    def _is_written(self, k: int, number: int, path: Path, text: str) -> bool:
        """Return whether turn k has a part of its prompt or of its answer.

        If a string gets longer, so must the rendering. Names and numbers of arguments are searched.
        """
        root = copy.deepcopy(self.tools if number < 0 else self.messages[number])
        if path[-1] == NAME or not isinstance(value_at(root, path), str):
            return text in self.prompt(k) + self.answer(k)
        value_at(root, path[:-1])[path[-1]] = text + PROBE
        tools = root if number < 0 else self.tools
        messages = self.messages if number < 0 else [*self.messages[:number], root, *self.messages[number + 1 :]]
        return PROBE in (self._answer(messages, tools, k) if number == k else self._render(messages[:k], tools, True))

    # -- the fewest samples

    @cached_property
    def renderings(self) -> list[str]:
        """Return every text that a sample may be."""
        counts = range(1, len(self.messages) + 1)
        texts = [self.text(count, prompt) for count in counts for prompt in (False, True)]
        return list(dict.fromkeys([*texts, *(self.prompt(k) + self.answer(k) for k in self.turns)]))

    def holds(self, text: str, turns: Sequence[int]) -> bool:
        """Return whether a text may train all of these turns."""
        for number, k in enumerate(turns):
            prompt = self.prompt(k)
            if not text.startswith(prompt + self.answer(k)):
                return False
            if self._ids(self.pieces(prompt, turns[:number])) != self._ids([(self._marked(prompt), False)]):
                return False
        return True

    def least(self) -> int:
        """Return the smallest number of samples that train every turn."""
        held = set[frozenset[int]]()
        for text in self.renderings:
            turns = [k for k in self.turns if self.holds(text, [k])]
            for size in range(len(turns), 0, -1):
                for some in combinations(turns, size):
                    if not any(held_by >= set(some) for held_by in held) and self.holds(text, some):
                        held.add(frozenset(some))
        for count in range(1, len(self.turns) + 1):
            if any(frozenset().union(*some) == set(self.turns) for some in combinations(held, count)):
                return count
        raise AssertionError("a prompt with its answer holds every turn")

    # -- samples

    def pieces(self, text: str, turns: Iterable[int]) -> Sample:
        """Return a text that trains on turns, each with its trained flag."""
        found: Sample = []
        done = 0
        for k in turns:
            start = len(self.prompt(k))
            stop = start + len(self.answer(k))
            found += [(self._marked(text[done:start]), False), (self._marked(text[start:stop]), True)]
            done = stop
        return [*found, (self._marked(text[done:]), False)]

    def _marked(self, text: str) -> str:
        return self._controls.sub(lambda found: mark(found[0]), text)

    def _ids(self, sample: Sample) -> list[int]:
        return encoded([sample], self.library)[0][0]


# -- parts ------------------------------------------------------------------------------------------------------------

NAME = "\0name"  # the end of the path of the name of an argument


def parts_of(value: Any, path: Path = ()) -> Iterator[tuple[Path, str]]:
    """Yield the path and the text of each name, string, and number that is not blank."""
    if isinstance(value, dict):
        named = path[-1:] in (("arguments",), ("properties",))
        for key, item in value.items():
            if named and key.strip():
                yield (*path, key, NAME), key
            if named or key not in SCHEMA:
                yield from parts_of(item, (*path, key))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from parts_of(item, (*path, number))
    elif isinstance(value, str) and value.strip():
        yield path, value
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, str(value)


def value_at(value: Any, path: Path) -> Any:
    for key in path:
        value = value[key]
    return value


def cache_of(render: Render) -> Render:
    known: dict[str, str] = {}

    def found(messages: Messages, tools: Tools, prompt: bool) -> str:
        key = repr((messages, tools, prompt))
        if key not in known:
            known[key] = render(copy.deepcopy(messages), copy.deepcopy(tools), prompt)
        return known[key]

    return found
