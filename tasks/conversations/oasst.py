"""Read the format `oasst`: the best-ranked path of a tree of messages."""

from __future__ import annotations

from tasks.conversations.chat import refuse_role
from tasks.conversations.fields import list_of, required, required_text
from tasks.conversations.model import Conversation, Message
from tasks.core.errors import Reject
from tasks.core.printable import kind

OASST_ROLE_NAMES = {"prompter": "user", "assistant": "assistant"}


def read_oasst(record: dict[str, object]) -> Conversation:
    """The best-ranked path: at every node the reply of the lowest rank, unranked ones last, then the first.

    A loop and not a recursion: the depth of a tree is the data's choice.
    """
    messages: list[Message] = []
    path: list[str] = []
    node = required(record, "prompt")
    place = "prompt"
    try:
        while node is not None:
            if not isinstance(node, dict):
                raise Reject("bad_type", f"{place}: expected an object, found {kind(node)}")
            if node.get("deleted"):
                break
            path.append(place)
            raw_role = node.get("role")
            role = OASST_ROLE_NAMES.get(raw_role) if isinstance(raw_role, str) else None
            if role is None:
                refuse_role(raw_role, "role", OASST_ROLE_NAMES)
            messages.append(Message(role, required_text(node, "text")))
            node, place = _best_reply(node)
    except Reject as error:  # the place is put together here alone: at every node it would cost the square of the depth
        raise Reject(error.reason, ".".join((*path, error.message))) from None
    while messages and messages[-1].role == "user":
        messages.pop()
    if not messages:
        raise Reject("empty", "prompt: no reply of an assistant is left in the tree")
    return Conversation(tuple(messages))


def _best_reply(node: dict[str, object]) -> tuple[object, str]:
    """The reply that the path goes on with, and its place in `node`; None where there is none that is not deleted."""
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
