"""Chat templates that refuse or skip messages, like those of older models."""

GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 is even) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
"""Like Gemma 2's: no system role, and alternating turns."""

MISTRAL = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 is even) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %}{{ m.content }}{{ eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}"
    "{% endfor %}"
)
"""Like the first Mistral's: alternating turns of two named roles."""

LLAMA = (
    "{% set system = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% set turns = messages[1:] if system else messages %}{% for m in turns %}"
    "{% if (m.role == 'user') != (loop.index0 is even) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "{% if m.role == 'user' %}{{ bos_token }}[INST] "
    "{% if loop.first and system %}<<SYS>>\n{{ system }}\n<</SYS>>\n\n{% endif %}"
    "{{ m.content.strip() }} [/INST]"
    "{% else %} {{ m.content.strip() }} {{ eos_token }}{% endif %}{% endfor %}"
)
"""Like Llama 2's: one system message at the start, then alternating turns."""

TWO_ROLES = (
    "{% for m in messages %}{% if m.role == 'user' %}<user>{{ m.content }}"
    "{% elif m.role == 'assistant' %}<model>{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<model>{% endif %}"
)
"""Silently skips every role except two."""

FIRST_SYSTEM = (
    "{% if messages[0].role == 'system' %}<system>{{ messages[0].content }}{% endif %}" + TWO_ROLES
)
"""Skips each system message except the first."""

USER_LAST = (
    "{% if messages[-1].role != 'user' %}{{ raise_exception('The user comes last') }}{% endif %}"
    + TWO_ROLES
)

STRICT = {"gemma": GEMMA, "mistral": MISTRAL, "llama": LLAMA}
