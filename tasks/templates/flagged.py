"""Train on turns that no model writes, if a flag in the data adds them.

    <|im_start|> user\\n ▓What is 6 × 7?▓ <|im_end|>   ──▶   <|im_start|> ▓user\\nWhat is 6 × 7?<|im_end|>▓

A label within a text would cut the text in two, and the tokens would differ from those of the prompt that the model
reads at inference. So the text between two control tokens is trained on as a whole, with the second one. A trained
answer ends it, too. `jinja.flagged` does the same for Jinja templates.
"""

from __future__ import annotations

from collections.abc import Sequence

from tasks.core.errors import Reject
from tasks.templates.spans import TEXT, Span


def with_whole_texts(spans: Sequence[Span], said: Sequence[bool]) -> list[Span]:
    """Return spans in which every text that holds a flagged turn is trained on.

    `said` is true for spans of the content of a message. Raises Reject if such a text holds another message.
    """

    def is_answer(place: int) -> bool:
        return said[place] and spans[place].role == "assistant"

    found: list[Span] = []
    top = 0
    while top < len(spans):
        end = top
        while end < len(spans) and spans[end].token == TEXT and not (is_answer(end) and spans[end].trained):
            end += 1
        text = spans[top:end]
        if not any(span.trained for span in text):
            found += spans[top : end + 1]
            top = end + 1
            continue
        others = [span for is_said, span in zip(said[top:end], text, strict=True) if is_said and not span.trained]
        if any(span.text.strip() for span in others):
            role = next(span.role for span in text if span.trained)
            raise Reject(
                "flag_not_followed",
                f"a {role} message has a flag that adds it to the trained turns, but the template writes it in one "
                f"text with a message of the role {others[0].role}",
            )
        found += [text[0]._replace(trained=True, alone=True), *(span._replace(trained=True) for span in text[1:])]
        for span in spans[end : end + 1]:
            found.append(span._replace(alone=True) if is_answer(end) else span._replace(trained=True))
        top = end + 1
    return found
