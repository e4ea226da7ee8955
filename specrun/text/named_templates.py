"""Chat templates by name, for tokenizers that have none: the forms that models are commonly trained on.

The names are llama.cpp's (src/llama-chat.cpp).
"""

from __future__ import annotations

_SYSTEM_FIRST = (
    "{% set system = messages[0].content if messages and messages[0].role == 'system' else '' %}"
    "{% set turns = messages[1:] if system else messages %}"
)
"""Beginning of templates in which the first user's message holds the system's."""
NAMED = {
    "chatml": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "llama2": (
        f"{_SYSTEM_FIRST}{{% for m in turns %}}"
        "{% if m.role == 'user' %}{{ bos_token }}[INST] "
        "{% if loop.first and system %}<<SYS>>\n{{ system }}\n<</SYS>>\n\n{% endif %}{{ m.content }} [/INST]"
        "{% else %} {{ m.content }} {{ eos_token }}{% endif %}{% endfor %}"
    ),
    "llama3": (
        "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
        "{{ m.content | trim }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    ),
    "gemma": (
        f"{_SYSTEM_FIRST}{{{{ bos_token }}}}{{% for m in turns %}}"
        "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{% if loop.first and system %}{{ system }}\n\n{% endif %}{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
    ),
    "mistral-v1": (
        f"{_SYSTEM_FIRST}{{{{ bos_token }}}}{{% for m in turns %}}"
        "{% if m.role == 'user' %} [INST] {% if loop.first and system %}{{ system }}\n\n{% endif %}"
        "{{ m.content }} [/INST]"
        "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
    ),
    "phi3": (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    ),
}
