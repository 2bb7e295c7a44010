"""Chat templates in Jinja.

They are templates of common models, and templates whose fields are hard to tell apart in the output.
"""

from __future__ import annotations

from support.tokenizer_kinds import CHATML_JINJA

CHATML_MARKED = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
    "{{ message.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
LLAMA3_MARKED = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content | trim }}<|eot_id|>{% endgeneration %}"
    "{% else %}{{ message.content | trim }}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
LLAMA2 = (
    "{% for message in messages %}{% if message.role == 'assistant' %} {{ message.content | trim }} {{ eos_token }}"
    "{% else %}{{ bos_token }}[INST] {{ message.content | trim }} [/INST]{% endif %}{% endfor %}"
)
TOOLS = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.name %}[{{ message.name }}] {% endif %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>"
    "{{ call.function.name }} {{ call.function.arguments | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ALTERNATING = (
    "{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}{% endfor %}" + CHATML_JINJA
)
DATED = "<|im_start|>system\nToday is {{ strftime_now('%d %b %Y') }}.<|im_end|>\n" + CHATML_JINJA
# Fields side by side, trimmed or not, and in frames that a field could complete to a control token.
JOINED = (
    "{{ tools | tojson }}{% if tools %}{{ tools | tojson(ensure_ascii=true) }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.name }}{{ m.content }}{{ m.name }}{{ m.tool_call_id }}"
    "{{ m.content | trim }}{{ m.name | trim }}<{{ m.content | trim }}>{{ '<|' ~ m.name ~ '|>' }}"
    "{% for c in m.tool_calls or [] %}{{ c.id }}{{ c.function.name | trim }}{% for k in c.function.arguments %}"
    "{{ k }}{{ c.function.arguments[k] }}{{ k | trim }}</{{ k }}>{% endfor %}{{ c.function.arguments }}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
