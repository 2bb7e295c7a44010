"""The published rules of each family, stated in plain Python and independently of the code that is tested.

    messages, tools ──▶ samples: [[(text, trained on), …], …]

`messages` are as in OpenAI's form, in the usual order: an optional system message, then requests and answers in turn;
the results of calls follow the calls. Sources: the chat templates of Qwen2.5 (ChatML), Llama 2, Llama 3, and Zephyr,
mistral-common (version 3), and Stanford Alpaca with the line break after "### Response:" of its successors.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

Messages = list[dict[str, Any]]
Sample = list[tuple[str, bool]]
BOS, EOS = "<s>", "</s>"


def dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def is_trained(message: dict[str, Any]) -> bool:
    return message["role"] == "assistant" and bool(message["content"].strip() or message.get("tool_calls"))


def joined(sample: Sample) -> str:
    return "".join(text for text, _ in sample)


# -- ChatML -----------------------------------------------------------------------------------------------------------


def chatml(messages: Messages, tools: list[Any]) -> list[Sample]:
    turns: list[tuple[str, str, bool]] = []
    if tools:
        described = "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        described += "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
        described += "".join(dumped(tool) + "\n" for tool in tools)
        described += "</tools>\n\nFor each function call, return a json object with function name and arguments within "
        described += "<tool_call></tool_call> XML tags:\n<tool_call>\n"
        described += '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
        if messages[0]["role"] == "system":
            described = messages[0]["content"] + "\n\n" + described
            messages = messages[1:]
        turns.append(("system", described, False))
    for message in messages:
        body = message["content"]
        if message["role"] == "tool":
            body = f"<tool_response>\n{body}\n</tool_response>"
            if turns[-1][0] == "results":
                body = f"{turns.pop()[1]}\n{body}"
            turns.append(("results", body, False))
            continue
        for call in message.get("tool_calls", []):
            called = {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
            body += "\n" * bool(body) + f"<tool_call>\n{dumped(called)}\n</tool_call>"
        turns.append((message["role"], body, is_trained(message)))
    sample: Sample = []
    for role, body, trained in turns:
        header = "\n" * bool(sample) + "<|im_start|>" + {"results": "user"}.get(role, role) + "\n"
        sample += [(header, False), (f"{body}<|im_end|>", trained)]
    return [sample]


# -- families without tools -------------------------------------------------------------------------------------------


def llama2(messages: Messages, _: list[Any]) -> list[Sample]:
    sample: Sample = []
    system = ""
    for message in messages:
        content = message["content"]
        if message["role"] == "system":
            system = f"<<SYS>>\n{content}\n<</SYS>>\n\n"
        elif message["role"] == "user":
            sample.append((f"{BOS}[INST] {(system + content).strip()} [/INST]", False))
            system = ""
        else:
            sample.append((f" {content.strip()} {EOS}", is_trained(message)))
    return [sample]


def llama3(messages: Messages, _: list[Any]) -> list[Sample]:
    sample: Sample = [("<|begin_of_text|>", False)]
    for message in messages:
        sample.append((f"<|start_header_id|>{message['role']}<|end_header_id|>\n\n", False))
        sample.append((f"{message['content'].strip()}<|eot_id|>", is_trained(message)))
    return [sample]


def zephyr(messages: Messages, _: list[Any]) -> list[Sample]:
    sample: Sample = []
    for message in messages:
        sample.append((("\n" if sample else "") + f"<|{message['role']}|>\n", False))
        sample.append((message["content"] + EOS, is_trained(message)))
    return [sample]


def alpaca(messages: Messages, _: list[Any]) -> list[Sample]:
    before = "Below is an instruction that describes a task. "
    before += "Write a response that appropriately completes the request."
    if messages[0]["role"] == "system":
        before = messages[0]["content"] if messages[0]["content"].strip() else before
        messages = messages[1:]
    sample: Sample = [(BOS + before, False)]
    for message in messages:
        if message["role"] == "user":
            sample.append((f"\n\n### Instruction:\n{message['content']}", False))
        else:
            sample += [("\n\n### Response:\n", False), (message["content"] + EOS, is_trained(message))]
    return [sample]


# -- Mistral ----------------------------------------------------------------------------------------------------------


def mistral(messages: Messages, tools: list[Any], space: str = " ", bos: str = BOS, eos: str = EOS) -> list[Sample]:
    """One sample, if what is written up to each trained answer begins what is written of all; else one for each."""
    whole = _mistral(messages, tools, space, bos, eos)
    starts = {
        k: _mistral(messages[: k + 1], tools, space, bos, eos)
        for k, message in enumerate(messages)
        if is_trained(message)
    }
    if all(joined(whole).startswith(joined(start)) for start in starts.values()):
        return [whole]
    return [[(text, False) for text, _ in start[:-1]] + start[-1:] for start in starts.values()]


def _mistral(messages: Messages, tools: list[Any], space: str, bos: str, eos: str) -> Sample:
    system = "\n\n".join(m["content"] for m in messages if m["role"] == "system" and m["content"])
    last_request = max(k for k, message in enumerate(messages) if message["role"] == "user")
    sample: Sample = [(bos, False)]
    for k, message in enumerate(messages):
        content, text = message["content"], ""
        if message["role"] == "user":
            if k == last_request and tools:
                text = f"[AVAILABLE_TOOLS]{space}{dumped(tools)}[/AVAILABLE_TOOLS]"
            if k == last_request and system:
                content = "\n\n".join(filter(None, (system, content)))
            sample.append((f"{text}[INST]{space * bool(content)}{content}[/INST]", False))
        elif message["role"] == "tool":
            value = {"content": _value(content), "call_id": message["tool_call_id"]}
            sample.append((f"[TOOL_RESULTS]{space}{dumped(value)}[/TOOL_RESULTS]", False))
        elif message["role"] == "assistant":
            content = content.rstrip(" ")
            text = space + content if content else ""
            if message.get("tool_calls"):
                # The model does not write ids; whoever runs it adds them to the history.
                ids = [{"id": call["id"]} if k + 1 < len(messages) else {} for call in message["tool_calls"]]
                functions = [call["function"] for call in message["tool_calls"]]
                calls = [
                    {"name": function["name"], "arguments": function["arguments"]} | key
                    for function, key in zip(functions, ids, strict=True)
                ]
                text += f"[TOOL_CALLS]{space}{dumped(calls)}"
            sample.append((text + eos, is_trained(message)))
    return sample


def _value(content: str) -> Any:
    try:
        return json.loads(content or "{}")
    except ValueError:
        return content


RULES: dict[str, Callable[[Messages, list[Any]], list[Sample]]] = {
    "chatml": chatml,
    "llama2": llama2,
    "llama3": llama3,
    "zephyr": zephyr,
    "alpaca": alpaca,
    "mistral": mistral,
}
WITH_TOOLS = ("chatml", "mistral")
