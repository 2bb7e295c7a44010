"""The format `oasst`: a tree of messages, read along its best-ranked path.

The loops are not recursions, because the data decides how deep the tree is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from packcorpus.tasks.conversations.chat import Object, refuse_role
from packcorpus.tasks.conversations.model import Conversation, Format, Message, Record, message_of, role_named
from packcorpus.tasks.conversations.names import ROLE_NAMES
from packcorpus.tasks.conversations.values import is_struct_of_lists, list_of, object_of, required, required_text
from packcorpus.tasks.core.errors import Reject
from packcorpus.tasks.core.printable import kind


def read(record: Record) -> Conversation:
    """Follow the reply with the lowest rank at every node.

    Unranked replies come last. Among equal ranks, the first reply wins.
    """
    messages: list[Message] = []
    path: list[str] = []
    node = required(record, "prompt")
    if isinstance(node, str):
        node = object_of(node, "prompt")
    place = "prompt"
    try:
        while node is not None:
            if not isinstance(node, dict):
                raise Reject("bad_type", f"{place}: expected an object, found {kind(node)}")
            if node.get("deleted"):
                break
            path.append(place)
            raw_role = node.get("role")
            role = role_named(raw_role, ROLE_NAMES)
            if role is None:
                refuse_role(raw_role, "role", ROLE_NAMES)
            messages.append(message_of(role, required_text(node, "text")))
            node, place = _best_reply(node)
    except Reject as error:  # joined only here, because joining at every node would take quadratic time
        raise Reject(error.reason, ".".join((*path, error.message))) from None
    while messages and messages[-1].role == "user":
        messages.pop()
    if not messages:
        raise Reject("empty", "prompt: the tree has no reply of an assistant")
    return Conversation(tuple(messages))


def _best_reply(node: Record) -> tuple[object, str]:
    """Return the reply that the path continues with, and its place in `node`.

    The reply is None if there are no replies, or if all of them are deleted.
    """
    best: object = None
    place = ""
    best_order = (True, float("inf"))
    replies = node.get("replies")
    for index, reply in enumerate(() if replies is None else list_of(replies, "replies")):
        if not isinstance(reply, dict):
            raise Reject("bad_type", f"replies[{index}]: expected an object, found {kind(reply)}")
        rank = reply.get("rank")
        if rank is not None and (isinstance(rank, bool) or not isinstance(rank, (int, float))):
            raise Reject("bad_type", f"replies[{index}].rank: expected a number, found {kind(rank)}")
        order = (rank is None, 0.0 if rank is None else rank)
        if not reply.get("deleted") and order < best_order:
            best, place, best_order = reply, f"replies[{index}]", order
    return best, place


def _is_tree(value: object) -> bool:
    if isinstance(value, str):
        return value.lstrip().startswith("{") and '"replies"' in value
    return isinstance(value, dict) and not is_struct_of_lists(value)


def _objects(record: Record, columns: Mapping[str, str]) -> Iterator[Object]:
    """Yield the nodes of the tree; all nodes below the root have the same path."""
    where = columns.get("prompt", "prompt")
    below = f"{where}.replies[]"
    used = {columns.get("role", "role"), columns.get("content", "text"), "replies", "rank", "deleted"}
    root = record.get("prompt")
    try:
        open_nodes = [object_of(root, "")] if isinstance(root, (str, dict)) else []
    except Reject:
        return
    while open_nodes:
        node = open_nodes.pop()
        yield where, node, used
        where = below
        replies = node.get("replies")
        open_nodes += [reply for reply in replies if type(reply) is dict] if type(replies) is list else []


OASST = Format(
    name="oasst",
    keys=("prompt",),
    matches=lambda record: _is_tree(record.get("prompt")),
    read=read,
    summary="`prompt`, the root of a tree of messages with `role`, `text`, and `replies`; the best-ranked path",
    objects=_objects,
    example='{"prompt": {"role": "prompter", "text": "2+2?", "replies": [{"role": "assistant", "text": "4"}]}}',
)
