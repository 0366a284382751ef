"""Built-in chat templates, in Jinja like those of tokenizers, for models that come without one or with a wrong one.

They write no special token at the start: the tokenizer's own are added there. Replies end as the models were trained to
end them; `eos_token` and `bos_token` are the tokenizer's.
"""

from __future__ import annotations

# For base models: a dialogue as it is written in many texts.
PLAIN = """
{%- for message in messages %}
{%- if message.role == 'user' %}{{ 'User: ' + message.content + '\\n\\n' }}
{%- elif message.role == 'assistant' %}{{ 'Assistant: ' + message.content + '\\n\\n' }}
{%- else %}{{ message.content + '\\n\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"""

# https://github.com/openai/openai-python/blob/v0.28.1/chatml.md
CHATML = """
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# https://github.com/meta-llama/llama, chat_completion in llama/generation.py
LLAMA2 = """
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- for message in messages if message.role != 'system' %}
{%- if message.role == 'user' %}
{%- if not loop.first %}{{ bos_token }}{% endif %}
{{- '[INST] ' }}
{%- if loop.first and system %}{{ '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' }}{% endif %}
{{- message.content + ' [/INST]' }}
{%- else %}{{ ' ' + message.content + ' ' }}{{ eos_token }}
{%- endif %}
{%- endfor %}"""

# Vicuna 1.1 with the system sentence of LWM-Text-Chat: https://github.com/LargeWorldModel/LWM, scripts/sample_pyt.py
VICUNA = """
{%- set default = 'You are a helpful assistant.' %}
{{- (messages[0].content if messages[0].role == 'system' else default) + ' ' }}
{%- for message in messages if message.role != 'system' %}
{%- if message.role == 'user' %}{{ 'USER: ' + message.content + ' ' }}
{%- else %}{{ 'ASSISTANT: ' + message.content }}{{ eos_token }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"""

OWN = {"llama2": LLAMA2, "chatml": CHATML, "vicuna": VICUNA, "plain": PLAIN}
