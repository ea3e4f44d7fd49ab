"""The tiny model's chat template: turns for system, user, assistant and tool, and a list of tools."""

CHAT_TEMPLATE = """\
{{- bos_token }}
{%- set lead = namespace(system='') %}
{%- if messages and messages[0]['role'] == 'system' %}
  {%- set lead.system = messages[0]['content'] %}
{%- endif %}
{%- if lead.system or tools %}
  {{- '<|turn|>system\\n' + lead.system }}
  {%- if tools %}
    {{- '\\nYou may call these functions:\\n' }}
    {%- for tool in tools %}
      {{- tool | tojson + '\\n' }}
    {%- endfor %}
    {{- 'Call one so: <tool_call>{"name": "...", "arguments": {...}}</tool_call>' }}
  {%- endif %}
  {{- '<|turn_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
  {%- if message['role'] == 'system' and loop.first %}
    {%- continue %}
  {%- endif %}
  {%- if message['role'] not in ['system', 'user', 'assistant', 'tool'] %}
    {{- raise_exception('role must be system, user, assistant or tool, not ' + message['role']) }}
  {%- endif %}
  {{- '<|turn|>' + message['role'] + '\\n' }}
  {%- if message['content'] %}
    {{- message['content'] }}
  {%- endif %}
  {%- if message['tool_calls'] %}
    {%- for call in message['tool_calls'] %}
      {{- '<tool_call>{"name": ' + call['function']['name'] | tojson }}
      {{- ', "arguments": ' + call['function']['arguments'] | tojson + '}</tool_call>' }}
    {%- endfor %}
  {%- endif %}
  {{- '<|turn_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- '<|turn|>assistant\\n' }}
{%- endif %}
"""
