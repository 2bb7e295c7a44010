"""Chat templates of agents: tools, calls, results, and reasoning.

They are written for the tests, with the control tokens of the tokenizer `hf_byte_level`.
"""

from __future__ import annotations

from support.templates.modern_templates import EMPTY_LAST, PROMPT, STRIPPED

WITH_TOOLS = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
TURN = """<|im_start|>{{ m.role }}
{% if m.reasoning_content and KEEPS %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}
{{ c.function.arguments | tojson }}{% endfor %}<|im_end|>
"""
LAST = (
    "{% set ns = namespace(user=0) %}{% for m in messages if m.role == 'user' %}{% set ns.user = ns.user + 1 %}"
    "{% endfor %}"
)
_SOURCES = {
    # Reasoning is written after the last user message only, like many reasoning models do.
    "after the last user message": LAST
    + "{% set at = namespace(user=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set at.user = at.user + 1 %}"
    + "{% endif %}"
    + TURN.replace("KEEPS", "at.user == ns.user")
    + "{% endfor %}",
    # Reasoning of calls is left out once an answer without calls follows.
    "until the final answer": "{% for m in messages %}{% set rest = messages[loop.index:] "
    + "| selectattr('role', 'equalto', 'assistant') | rejectattr('tool_calls', 'defined') | list %}"
    + TURN.replace("KEEPS", "not rest")
    + "{% endfor %}",
    # A result is written with another end once an answer follows.
    "end of the last result": "{% for m in messages %}"
    + TURN.replace("KEEPS", "true").replace("<|im_end|>\n", "{{ '.' if loop.last and m.role == 'tool' }}<|im_end|>\n")
    + "{% endfor %}",
    "kept": "{% for m in messages %}" + TURN.replace("KEEPS", "true") + "{% endfor %}",
}

_END = "<|im_end|>\n{% endfor %}"
_CALLS = "{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}{% endfor %}"

AGENTS = {name: WITH_TOOLS + source + PROMPT for name, source in _SOURCES.items()} | {
    "in the last turn": WITH_TOOLS + STRIPPED.replace(_END, _CALLS + _END),
    "empty block in the last turn": WITH_TOOLS + EMPTY_LAST.replace(_END, _CALLS + _END),
}
# Templates without a place for a part of a conversation.
LOSING = {
    "results": AGENTS["kept"].replace("{% for m in messages %}", "{% for m in messages if m.role != 'tool' %}"),
    "system": AGENTS["kept"].replace("{% for m in messages %}", "{% for m in messages if m.role != 'system' %}"),
    "tools": AGENTS["kept"].removeprefix(WITH_TOOLS),
    "schemas": AGENTS["kept"].replace("{{ tools | tojson }}", "{% for t in tools %}{{ t.function.name }}{% endfor %}"),
    "arguments": AGENTS["kept"].replace("{{ c.function.arguments | tojson }}", ""),
    "calls of the history": AGENTS["kept"]
    .replace("{% for c in", "{% if loop.last %}{% for c in")
    .replace("tojson }}{% endfor %}<", "tojson }}{% endfor %}{% endif %}<"),
    "results of the history": AGENTS["kept"].replace(
        "{{ m.content }}", "{{ m.content if m.role != 'tool' or loop.index > messages | length - 2 }}"
    ),
    "the last result": AGENTS["kept"].replace(
        "{{ m.content }}", "{{ m.content if m.role != 'tool' or not loop.last }}"
    ),
}
