"""Cut rendered texts into spans at control tokens and edges of trained ranges.

    <|im_start|>user\\n2+2?<|im_end|>\\n   ──▶   control token, text, control token, text

A turn is encoded alone, as the model writes it, and later prompts are encoded as a whole. Both have the same tokens
only if no token crosses an edge of the turn, which `TokenBoundary` decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain, pairwise
from math import inf

import numpy as np

from packcorpus.tasks.encoders.encoder import Encoder
from packcorpus.tasks.templates.jinja.control_strings import escaped
from packcorpus.tasks.templates.jinja.turns.answers import common_start
from packcorpus.tasks.templates.jinja.turns.marks import Range
from packcorpus.tasks.templates.spans import TEXT, Span

# Numbers of characters before and after a boundary that matter, if there is no control token among them.
_TAIL, _HEAD = 32, 32

# The maximum number of boundaries that are remembered.
_MOST_KNOWN = 1 << 14


class TokenBoundary:
    """Check for boundaries of an encoder's tokens between two texts."""

    def __init__(self, encoder: Encoder):
        self.encoder = encoder
        self._known: dict[tuple[str, str], bool] = {}

    def tail(self, before: str) -> str:
        """Return the last characters of a text after its last control token."""
        ends = self.encoder.control_pattern.finditer(before, max(0, len(before) - 64))
        return before[max((match.end() for match in ends), default=0) :][-_TAIL:]

    def splits(self, tail: str, after: str) -> bool:
        """Return whether no token crosses from `tail`, the end of a text, into `after`."""
        return self.splits_all([(tail, after)])

    def splits_all(self, pairs: Iterable[tuple[str, str]]) -> bool:
        """Return whether no token crosses from a tail into the text after it, in any pair."""
        keys = [key for tail, after in pairs for key in self._keys(tail, after)]
        if new := [key for key in dict.fromkeys(keys) if key not in self._known]:
            if len(self._known) + len(new) > _MOST_KNOWN:
                new = list(dict.fromkeys(keys))
                self._known = {}
            texts = []
            for tail, head in new:
                alone = self.encoder.with_leading_space(head) if tail.endswith(self.encoder.space_follows) else head
                texts += [tail + head, tail, alone]
            encoded = self.encoder.encode(texts)
            for number, key in enumerate(new):
                start, middle, _, end = encoded.offsets[3 * number : 3 * number + 4]
                self._known[key] = np.array_equal(encoded.ids[start:middle], encoded.ids[middle:end])
        return all(self._known[key] for key in keys)

    def _keys(self, tail: str, after: str) -> list[tuple[str, str]]:
        """Return a tail, which may have a leading space, and the text after it."""
        if not tail or not after:
            return []
        match = self.encoder.control_pattern.search(after, 0, 64)
        head = after[: match.start() if match else _HEAD]
        if not head:
            return []
        if tail.endswith("\n") and not head[0].isspace() and self._newlines_end_tokens:
            head = head[0]
        may_lead = self.encoder.leading_space != "none" and len(tail) < _TAIL
        return [(tail, head), (self.encoder.with_leading_space(tail), head)] if may_lead else [(tail, head)]

    def is_complete(self, after: str) -> bool:
        """Return whether further text after this text cannot change the result."""
        return len(after) >= 64 or self.encoder.control_pattern.search(after, 0, 64) is not None

    @cached_property
    def _newlines_end_tokens(self) -> bool:
        """Return whether only white space follows a line end within a token.

        In this case, no token crosses from a line end into the word after it. A content token that absorbs the white
        space before it does.
        """
        if not self.encoder.strips_left.isdisjoint(self.encoder.content_tokens):
            return False
        pieces = map(self.encoder.token_bytes, range(self.encoder.vocab_size))
        return not any(piece.rpartition(b"\n")[2].strip() for piece in pieces if b"\n" in piece)


class Splitter:
    """Cut texts that were rendered for the tokenizer of an encoder."""

    def __init__(self, encoder: Encoder):
        self._encoder = encoder
        controls = encoder.controls.items()
        self.controls = {
            (string, flag): Span(string, token, flag, "") for string, token in controls for flag in (False, True)
        }
        # The text after a control string decides whether it is part of a longer control string, or absorbs white space.
        self._ahead = max(map(len, encoder.controls), default=0)
        self._is_local = not encoder.strips_left and not encoder.strips_right and 1 not in map(len, encoder.controls)

    def split_all(self, texts: Iterable[tuple[str, Sequence[Range]]], private: str) -> Iterator[list[Span]]:
        """Yield the spans of each text of a conversation, without the private character.

        The ranges of a text are trained on. Texts beside an empty range are encoded apart. The samples of a
        conversation start with the same text, which is cut only once.
        """
        last, first, spans, ends = "", inf, list[Span](), list[int]()
        for text, ranges in texts:
            count, before, first = 0, first, ranges[0][0] if ranges else inf
            if ends and self._is_local:
                same = min(common_start(text, last) - self._ahead, first, before)
                count = len(ends)
                while count and not (ends[count - 1] <= same and spans[count - 1].token != TEXT):
                    count -= 1
            last, spans, ends = text, spans[:count], ends[:count]
            self._cut(text, ranges, private, spans, ends)
            yield spans

    def _cut(self, text: str, ranges: Sequence[Range], private: str, spans: list[Span], ends: list[int]) -> None:
        edges = [*chain(*ranges), inf]  # ascending: text after an odd number of edges is trained on
        joints = {stop for (_, stop), (start, _) in pairwise(ranges) if start == stop}
        joints |= {start for start, stop in ranges if start == stop}
        forms = [form for form in (private, escaped(private)) if form in text]
        end = ends[-1] if ends else 0
        passed = 0  # number of edges
        for (start, stop), string, place in chain(self.controls_in(text, private, end), [((len(text),) * 2, "", inf)]):
            while end < start:
                while edges[passed] <= end:
                    passed += 1
                cut = int(min(edges[passed], start))
                piece = text[end:cut]
                for form in forms:
                    piece = piece.replace(form, "")
                if piece:
                    spans.append(Span(piece, TEXT, passed % 2 == 1, "", alone=end in joints))
                    ends.append(cut)
                end = cut
            if string:
                while edges[passed] <= place:
                    passed += 1
                spans.append(self.controls[string, passed % 2 == 1])
                ends.append(stop)
            end = stop

    def controls_in(self, text: str, private: str, start: int = 0) -> list[tuple[tuple[int, int], str, int]]:
        """Return the control strings that the template wrote.

        Each item has the range of the string with the white space that it absorbs, the string, and its start.
        """
        if self._is_local:
            return [
                (match.span(), match[0], match.start()) for match in self._encoder.control_pattern.finditer(text, start)
            ]
        controls = []
        for match in self._encoder.written_pattern.finditer(text, start):
            written, (first, stop) = match.group(), match.span()
            string = written if written in self._encoder.controls else written.strip()
            if len(string) > 1 or text[stop : stop + 2] != private * 2:
                controls.append(((first, stop), string, first + written.index(string)))
        return controls
