"""Chat templates, one for each way in which published models change a turn.

They are written for the tests, with the control tokens of the tokenizer `hf_byte_level`. Some change the history, too.
"""

from __future__ import annotations

PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
OPEN_PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
LOOP = "{% for m in messages %}<|im_start|>{{ m.role }}\n"

# Reasoning stays in all turns after the last question.
STRIPS = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}" + LOOP + "{% if m.reasoning_content and loop.index0 > ns.last %}<think>\n"
    "{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}" + PROMPT
)
# Reasoning stays in the last turn and is left out of the history.
STRIPPED = (
    LOOP
    + "{% if loop.last and m.reasoning_content %}<think>\n{{ m.reasoning_content | trim }}\n</think>\n\n{% endif %}"
    "{{ m.content.split('</think>')[-1].lstrip('\n') if m.role == 'assistant' else m.content }}<|im_end|>\n"
    "{% endfor %}" + PROMPT
)
# An empty block of reasoning in the last turn only.
EMPTY_LAST = (
    LOOP + "{% if loop.last and m.role == 'assistant' %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}" + PROMPT
)
# The prompt opens the reasoning, and no turn contains it.
OPENED = (
    LOOP + "{{ m.content.split('</think>')[-1].lstrip('\n') if m.role == 'assistant' else m.content }}<|im_end|>\n"
    "{% endfor %}" + OPEN_PROMPT
)
# The prompt has an empty block of reasoning unless the option asks for reasoning; turns have none.
OPTIONAL = (
    LOOP + "{% if m.reasoning_content and enable_thinking %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
# Reasoning is read from the content alone.
INLINE = (
    LOOP + "{% if m.role == 'assistant' and '</think>' in m.content %}"
    "[{{ m.content.split('</think>')[0].split('<think>')[-1].strip() }}] "
    "{{ m.content.split('</think>')[-1].lstrip('\n') }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n"
    "{% endfor %}" + PROMPT
)
# A second end token, only at the very end.
END_TWICE = (
    LOOP + "{{ m.content }}<|im_end|>\n{% endfor %}" + PROMPT.replace("{% endif %}", "{% else %}<|eot_id|>{% endif %}")
)
# The header of the next turn follows every turn: a model stops before it, at its EOS token.
NEXT_HEADER = (
    "<|im_start|>{{ messages[0].role }}\n{% for m in messages %}{{ m.content }}<|im_end|>\n"
    "<|im_start|>{{ 'user' if m.role == 'assistant' else 'assistant' }}\n{% endfor %}"
)
# An end token only at the very end: no turn in the history has one.
END_LAST = (
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}"
    "{% if loop.last and m.role == 'assistant' %}<|eot_id|>{% else %}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# No end token: the header of the next turn ends a turn.
NO_END = (
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>{% endif %}"
)
DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    + LOOP
    + "{{ m.content }}<|im_end|>\n{% endfor %}"
    + PROMPT
)
# The system message is part of the last user turn, if that turn is the last message.
SYSTEM_IN_LAST = (
    "{{ bos_token }}{% set text = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% for m in messages if m.role != 'system' %}{% if m.role == 'user' %}<|start_header_id|>"
    "{% if loop.last and text %}{{ text }}\n\n{% endif %}{{ m.content }}<|end_header_id|>"
    "{% else %}{{ m.content }}<|eot_id|>{% endif %}{% endfor %}"
)
TRIMMED = LOOP + "{{ m.content if loop.last else m.content | trim }}<|im_end|>\n{% endfor %}" + PROMPT
COUNTED = "{{ messages | length }}" + LOOP + "{{ m.content }}<|im_end|>\n{% endfor %}" + PROMPT
# The prompt begins the answer, and no token shows what the model writes after it.
INTRODUCED = LOOP + "{{ m.content }}<|im_end|>\n{% endfor %}" + PROMPT.replace("assistant\n", "assistant\nI think: ")

# A token joins the end of an answer with the name of the next role.
WITHOUT_ENDS = (
    "{% for m in messages %}{{ 'ASSISTANT' if m.role == 'assistant' else 'the ' + m.role }}: {{ m.content }} "
    "{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
MODERN = {
    "reasoning stripped from history": STRIPPED,
    "empty block in the last turn": EMPTY_LAST,
    "prompt opens the reasoning": OPENED,
    "prompt has an empty block": OPTIONAL,
    "end token twice at the end": END_TWICE,
    "header after every turn": NEXT_HEADER,
    "end token at the end only": END_LAST,
    "no end token": NO_END,
    "default system message": DEFAULT_SYSTEM,
    "system message in the last user turn": SYSTEM_IN_LAST,
    "history trimmed": TRIMMED,
    "messages counted": COUNTED,
}

# Tools: calls are written if the content is null, or never.
CALLS_IF_NULL = (
    LOOP + "{% if none == m.content %}{% for c in m.tool_calls %}<tool_call>{{ c.function.name }} "
    "{{ c.function.arguments | tojson }}</tool_call>{% endfor %}{% else %}{{ m.content }}{% endif %}<|im_end|>\n"
    "{% endfor %}" + PROMPT
)
# Calls are written if the arguments are text.
TEXT_ARGUMENTS = (
    LOOP
    + "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name + ' ' + c.function.arguments }}"
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}" + PROMPT
)
# Results follow calls, and the content follows both. A turn that continues has no header and follows the last turn,
# whose end token is left out. The prompt has the end token, and no header.
CONTINUED = (
    "{% set ns = namespace(before=none) %}{% for m in messages %}{% if m.role != 'tool' %}"
    "{% if m.role != 'assistant' or ns.before != 'assistant' %}<|im_start|>{{ m.role }}\n{% endif %}"
    "{% set ns.before = m.role %}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}</tool_call>{% endfor %}"
    "{% set result = loop.nextitem if loop.nextitem and loop.nextitem.role == 'tool' else none %}"
    "{% if result %}<result>{{ result.content }}</result>{% endif %}{{ m.content }}"
    "{% set next = messages[loop.index0 + (2 if result else 1)] %}"
    "{% if (next is defined and next.role == 'assistant') or (m.tool_calls and not result) %}"
    "{% elif next is defined or m.content or not result %}<|im_end|>\n{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}<|im_start|>assistant\n{% endif %}"
)
# Contents are lists of parts, as in multimodal models; iterating over a text gives characters.
PARTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for part in m.content %}{% if part.type == 'text' %}"
    "{{ part.text }}{% else %}<image>{% endif %}{% endfor %}<|im_end|>\n{% endfor %}" + PROMPT
)
# A text has no attribute `type`, so that the template refuses it.
SELECTED_PARTS = (
    LOOP + "{% for part in m.content | selectattr('type', 'equalto', 'text') %}{{ part['text'] }}{% endfor %}"
    "<|im_end|>\n{% endfor %}" + PROMPT
)
# Answers are left out.
QUESTIONS = LOOP + "{% if m.role != 'assistant' %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}" + PROMPT
NO_CALLS = LOOP + "{{ m.content }}<|im_end|>\n{% endfor %}" + PROMPT
