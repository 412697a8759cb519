"""Make the tokenizers and the expected chat prompts that tests/router/prompt.rs reads.

Run `python tests/data/make_prompt_data.py` with `transformers` and `tokenizers` installed. The texts, tokenizers and
templates are ours, the templates in the manner of well-known model families; transformers only renders them.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers.utils.chat_template_utils import render_jinja_template

HERE = Path(__file__).parent

CORPUS = [
    "The river runs down to the mill, and the mill race carries the water to the wheel.",
    "A worker reads a prompt, and the router streams the answer token by token to the reader.",
    "You are a helpful assistant. The user asks: what is the weather in Paris today?",
    "def main() -> None:\n    for i in range(10):\n        print(i, 'hello world')\n    return None\n",
    "Numbers such as 1, 22, 333 and 4444 are split; so are don't, we're and it's.",
    "Grüße aus Köln! Ça va très bien, merci. Ελληνικά και русский текст, 日本語のテキスト。",
    "system user assistant tool message content role name arguments function result",
    '{"name": "get_weather", "arguments": {"city": "Paris", "unit": "celsius"}}',
]


def byte_level() -> Tokenizer:
    """Byte-level BPE with a regex split, as Llama 3, Qwen and SmolLM2 have."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(
        pattern=Regex(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        ),
        behavior="isolated",
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=700,
            show_progress=False,
            special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    tokenizer.add_tokens(["<think>", "</think>"])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """SentencePiece-like BPE with byte fallback, as Llama 2 and Mistral have."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")  # words, for training
    trained.train_from_iterator(
        CORPUS[:5], trainers.BpeTrainer(vocab_size=400, show_progress=False)
    )
    model = json.loads(trained.to_str())["model"]
    words = sorted(model["vocab"], key=model["vocab"].get)
    vocab = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], *words]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={word: i for i, word in enumerate(vocab)},
            merges=[tuple(merge) for merge in model["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = trained.normalizer
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>", "[INST]", "[/INST]"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def word_piece() -> Tokenizer:
    """WordPiece with lower-casing, as BERT has."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.WordPieceTrainer(
            vocab_size=300,
            show_progress=False,
            special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"],
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair=None, special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return tokenizer


TEMPLATES: dict[str, str] = {
    # In the manner of SmolLM2: ChatML with a default system message.
    "chatml": (
        "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
        "{{ '<|im_start|>system\nYou are a mill hand.<|im_end|>\n' }}{% endif %}"
        "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    # In the manner of Llama 3: headers, tools as indented JSON, a date, slices, trim.
    "headers": """{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}

{#- The first message may be the system's. #}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start|>system<|end|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: python\\n" }}
{%- endif %}
{{- "Today is " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {{- "Functions you may call:\\n\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|eot|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start|>' + message['role'] + '<|end|>\\n\\n'+ message['content'] | trim + '<|eot|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("Only one call at a time!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start|>assistant<|end|>\\n\\n{"name": "' + tool_call.name + '", "parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}" }}
        {{- "<|eot|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start|>ipython<|end|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant<|end|>\\n\\n' }}
{%- endif %}
""",
    # In the manner of Qwen 3: namespace, reversed loop, thinking split off, generation marks.
    "thinking": """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- else %}
            {%- if '</think>' in content %}
                {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
                {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
            {%- endif %}
        {%- endif %}
        {%- generation -%}
        {%- if loop.index0 > ns.last_query_index %}
            {%- if loop.last or (not loop.last and reasoning_content) %}
                {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
            {%- else %}
                {{- '<|im_start|>' + message.role + '\\n' + content }}
            {%- endif %}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}
                    {{- '\\n' }}
                {%- endif %}
                {%- if tool_call.function %}
                    {%- set tool_call = tool_call.function %}
                {%- endif %}
                {{- '<tool_call>\\n{"name": "' }}
                {{- tool_call.name }}
                {{- '", "arguments": ' }}
                {%- if tool_call.arguments is string %}
                    {{- tool_call.arguments }}
                {%- else %}
                    {{- tool_call.arguments | tojson }}
                {%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {%- endgeneration -%}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' }}
        {{- content }}
        {{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}""",
    # In the manner of Mistral: strict alternation, raised errors, loop controls, eos after answers.
    "inst": """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set ns = namespace() %}
{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or (message.tool_calls is defined and message.tool_calls is not none)) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("Roles must alternate: user/assistant/user/assistant/...") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "comment" %}{% continue %}{% endif %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == loop_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}
                        {{- '"' + key + '": "' + val + '"' }}
                    {%- else %}
                        {{- '"' + key + '": ' + val|tojson }}
                    {%- endif %}
                    {%- if not loop.last %}
                        {{- ", " }}
                    {%- endif %}
                {%- endfor %}
                {{- "}}" }}
                {{- ", " if not loop.last else "]" }}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" and message.content %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported here!") }}
    {%- endif %}
{%- endfor %}
""",
    # In the manner of DeepSeek: wide bars, state in one namespace, output on one line.
    "wide_bars": (
        "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}"
        "{% set ns = namespace(is_first=true, is_tool=false, system_prompt='') %}"
        "{%- for message in messages %}{%- if message['role'] == 'system' %}"
        "{% if ns.is_first %}{% set ns.system_prompt = ns.system_prompt + message['content'] %}"
        "{% set ns.is_first = false %}{% else %}"
        "{% set ns.system_prompt = ns.system_prompt + '\n\n' + message['content'] %}{% endif %}"
        "{%- endif %}{%- endfor %}{{ bos_token }}{{ ns.system_prompt }}"
        "{%- for message in messages %}{%- if message['role'] == 'user' %}{%- set ns.is_tool = false -%}"
        "{{'<｜User｜>' + message['content']}}{%- endif %}"
        "{%- if message['role'] == 'assistant' and message['content'] is not none %}"
        "{% set content = message['content'] %}{% if '</think>' in content %}"
        "{% set content = content.split('</think>')[-1] %}{% endif %}"
        "{{'<｜Assistant｜>' + content + eos_token}}{%- endif %}"
        "{%- if message['role'] == 'tool' %}{%- set ns.is_tool = true -%}"
        "{{'<｜tool｜>' + message['content'] + '<｜tool end｜>'}}{%- endif %}{%- endfor -%}"
        "{% if add_generation_prompt and not ns.is_tool %}{{'<｜Assistant｜><think>\n'}}{% endif %}"
    ),
    # Python's own ways: str() of values, macros, filters, None, floats, block assignment.
    "python": """{%- macro line(name, value='?') -%}
{{ name|upper }}={{ value }};
{%- endmacro -%}
{% set greeting %}Hi {{ messages|length }}{% endset %}
{{ greeting }}
{% for m in messages if m.role != 'skip' %}
  {{ line(m.role, m.get('value', none)) }} {{ line(m.role) }}
  {{ m }}
  {{ m.value|tojson(indent=2) }}|{{ m|tojson(sort_keys=true) }}|{{ m|tojson(ensure_ascii=True) }}
  {{- m.value|tojson(separators=(',', ':')) }}
{% else %}
nobody
{% endfor %}
{{ messages|selectattr('role', 'equalto', 'user')|map(attribute='role')|join('+') }}
{{ (messages|first).role.title() }} {{ messages[-1]['role'].replace('u', 'U') }} {{ [1, 2.5, true, none, "it's"] }}
{{ unknown }}{{ messages[0].missing }}{{ 7 // 2 }} {{ 7 / 2 }} {{ 'x' in ['x'] }} {{ 2 ** 3 }} {{ "%s" | replace('%s', 'y') }}
{% if tools %}{{ tools[0]['function']['name'] }}{% endif -%}
{%- for k, v in {'b': 1, 'a': [1.0, 1e20]}|dictsort %}{{ k }}:{{ v }} {% endfor %}
""",
}

CALL = {
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": "Köln", "n": 1.0}},
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a <city> & \"more\"; it's 'fine'",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "n": {"type": "integer", "minimum": 0}},
                "required": ["city"],
                "additionalProperties": False,
                "examples": [],
            },
        },
    }
]
SYSTEM = {"role": "system", "content": " Be brief.\n"}
USER = {"role": "user", "content": "What is a head race? <b>&amp;</b> 日本 \u2028 🙂"}
ANSWER = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nThe water's way.  "}
AGAIN = {"role": "user", "content": '  And "then"?\n'}

CHATS: list[dict[str, Any]] = [
    {"messages": [USER], "add_generation_prompt": True},
    {"messages": [SYSTEM, USER], "add_generation_prompt": False},
    {"messages": [SYSTEM, USER, ANSWER, AGAIN], "add_generation_prompt": True},
    {"messages": [USER, ANSWER], "continue_final_message": True},
    {"messages": [USER, {"role": "assistant", "content": "Once"}], "continue_final_message": True},
    {"messages": [USER, AGAIN], "add_generation_prompt": True},
    {"messages": [SYSTEM, USER], "tools": TOOLS, "add_generation_prompt": True},
    {
        "messages": [
            USER,
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": "12 degrees"},
            {"role": "tool", "content": "and rain"},
        ],
        "tools": TOOLS,
        "add_generation_prompt": True,
    },
    {"messages": [USER, {"role": "assistant", "content": "yes", "reasoning": "so"}]},
    {"messages": [USER], "add_generation_prompt": True, "kwargs": {"enable_thinking": False}},
    {"messages": [{"role": "user", "content": None}], "add_generation_prompt": True},
    {"messages": [{"role": "user"}], "add_generation_prompt": True},
]
PYTHON_CHATS: list[dict[str, Any]] = [
    {
        "messages": [
            {"role": "user", "value": {"a": [1, 2.0, True, None, "é\n\u007f\u2028🙂\"'"], "b": {}}},
            {"role": "skip"},
            {"role": "user", "value": [], "0": 0.1, "z": 1e-7, "y": 123456789012345678},
        ],
        "tools": TOOLS,
    },
    {"messages": [{"role": "user", "value": "it's \\ \"\t"}]},
]


def expected(template: str, chat: dict[str, Any]) -> dict[str, Any]:
    """The case with what transformers makes of it; `error` is true where it raises."""
    case = {"template": template, **chat}
    variables: dict[str, Any] = {"date_string": "26 Jul 2024"} | chat.get("kwargs", {})
    try:
        (text,), _ = render_jinja_template(
            conversations=[chat["messages"]],
            tools=chat.get("tools"),
            chat_template=TEMPLATES[template],
            add_generation_prompt=chat.get("add_generation_prompt", False),
            continue_final_message=chat.get("continue_final_message", False),
            bos_token="<s>",
            eos_token="</s>",
            **variables,
        )
    except Exception as error:
        return {**case, "error": str(error)}
    return {**case, "expected": text}


def main() -> None:
    for name, make in [
        ("byte_level", byte_level),
        ("byte_fallback", byte_fallback),
        ("word_piece", word_piece),
    ]:
        text = json.dumps(json.loads(make().to_str()), ensure_ascii=False, separators=(",", ":"))
        (HERE / f"tokenizer_{name}.json").write_text(text + "\n", encoding="utf-8")
    cases = [expected(name, chat) for name in TEMPLATES if name != "python" for chat in CHATS]
    cases += [expected("python", chat) for chat in PYTHON_CHATS]
    text = json.dumps({"templates": TEMPLATES, "cases": cases}, ensure_ascii=False, indent=1)
    (HERE / "chat_templates.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
