"""Small tokenizers in the forms that published models have, trained where they are asked for.

The split patterns are those of the tokenizer.json of Llama 3 and Qwen 2 (GPT-2's is built into the library); the
templates are ours, in each family's manner.
"""

from __future__ import annotations

import io
import json
from pathlib import Path

import sentencepiece

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
TEXTS = [
    "What is 12 + 34?\nThe answer is 46.",
    "<|im_start|>user\nhello<|im_end|>\n",
    "def f(x):\n    if x:\n        return [y for y in range(x)]\n",
    "\tindented  text,\u00e9\u00e8 \u65e5\u672c\u8a9e \U0001f389\n",
    "It's the user's system: don't say <think> or </s> or [INST], we'll see.",
    *(f"What is {a} plus {b}? It is {a + b}." for a in range(12) for b in range(12)),
]

CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- 'You may call these functions, each given as JSON:\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- '\\n</tools>\\nAnswer with <tool_call>JSON</tool_call> to call one.<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' and not message.content.startswith('<tool_response>') %}
        {%- set ns.last = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'system' and loop.first %}{%- continue %}{%- endif %}
    {%- if message.role == 'assistant' %}
        {%- set thought = message.reasoning_content if message.reasoning_content is string else '' %}
        {%- set said = message.content if message.content is string else '' %}
        {%- if '</think>' in said %}
            {%- set thought = said.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set said = said.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last and thought %}{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}{%- endif %}
        {{- said }}
        {%- for call in message.tool_calls or [] %}
            {%- if not loop.first or said %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {%- set given = call.function.arguments %}
            {{- given if given is string else given | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

LLAMA3 = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set told = messages[0]['content'] | trim %}{%- set rest = messages[1:] %}
{%- else %}
    {%- set told = '' %}{%- set rest = messages %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday: ' + strftime_now('%d %b %Y') + '\\n\\n' }}
{%- if tools is not none %}{{- 'Functions:\\n' }}
{%- for t in tools %}{{- t | tojson(indent=4) + '\\n\\n' }}{%- endfor %}{%- endif %}
{{- told + '<|eot_id|>' }}
{%- for message in rest %}
    {%- if message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}{{- raise_exception('one call at a time') }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}{{- '}<|eot_id|>' }}
    {%- elif message.role in ['tool', 'ipython'] %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content | tojson + '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {%- generation %}{{- message['content'] | trim + '<|eot_id|>' }}{%- endgeneration %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

GEMMA = """\
{{ bos_token }}
{%- set lead = '' %}
{%- if messages[0]['role'] == 'system' %}
    {%- set lead = messages[0]['content'] + '\\n\\n' %}{%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('turns must go user, assistant, user, ...') }}
    {%- endif %}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{- '<start_of_turn>' + role + '\\n' + (lead if loop.first else '') }}
    {{- message['content'] | trim }}{{ '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{%- endif %}
"""

MISTRAL = """\
{%- if messages[0].role == 'system' %}
    {%- set told = messages[0].content %}{%- set turns = messages[1:] %}
{%- else %}
    {%- set told = none %}{%- set turns = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in turns %}
    {%- if message.role == 'user' %}
        {%- if loop.last and told is not none %}{{- '[INST] ' + told + '\\n\\n' + message.content + '[/INST]' }}
        {%- else %}{{- '[INST] ' + message.content + '[/INST]' }}{%- endif %}
    {%- elif message.role == 'assistant' %}{{- ' ' + message.content | trim + eos_token }}
    {%- else %}{{- raise_exception('only user and assistant roles, not ' + message.role) }}
    {%- endif %}
{%- endfor %}
"""

PHI = """\
{% for message in messages %}
{% if message.content %}{{ '<|' + message['role'] + '|>' + '\\n' + message['content'] + '<|end|>' + '\\n' }}{% endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>' + '\\n' }}{% else %}{{ eos_token }}{% endif %}
"""

# Special tokens in the order of their ids, other added tokens after them.
CONTROLS = {
    "qwen": (["<|endoftext|>", "<|im_start|>", "<|im_end|>"], ["<think>", "</think>", "<tool_call>", "</tool_call>",
                                                             "<tool_response>", "</tool_response>"]),
    "llama3": (["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"], []),
    "gpt2": (["<|endoftext|>"], []),
    "gemma": (["<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"], []),
    "mistral": (["<unk>", "<s>", "</s>", "[INST]", "[/INST]"], []),
    "phi": (["<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"], []),
}  # fmt: skip
NAMED = {
    "qwen": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    "llama3": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    "gpt2": {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"},
    "gemma": {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"},
    "mistral": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "phi": {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
}
TEMPLATES = {"qwen": CHATML, "llama3": LLAMA3, "gemma": GEMMA, "mistral": MISTRAL, "phi": PHI}


def write_json(folder: Path, files: dict) -> Path:
    """Writes JSON objects, and texts as they are, into a folder that is made."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=1)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def byte_level(form: str, folder: Path, *, texts=TEXTS, vocab_size: int = 500, template: str | None = "") -> Path:
    """Writes a byte-level BPE folder, `form` one of CONTROLS. `template`: "" the family's own; None: none."""
    import tokenizers
    from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

    special, other = CONTROLS[form]
    tokenizer = tokenizers.Tokenizer(models.BPE(ignore_merges=form == "llama3"))
    if form == "qwen":
        tokenizer.normalizer = normalizers.NFC()
    if form in ("gpt2", "phi"):
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        split = Regex(LLAMA3_SPLIT if form == "llama3" else QWEN_SPLIT)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Split(split, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    rstrip = form == "phi"
    tokenizer.add_special_tokens(
        [AddedToken(t, normalized=False, rstrip=rstrip and t != "<|endoftext|>") for t in special]
    )
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in other])
    if form == "llama3":
        begin = ("<|begin_of_text|>", tokenizer.token_to_id("<|begin_of_text|>"))
        tokenizer.post_processor = processors.Sequence([
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single=f"{begin[0]} $A", special_tokens=[begin]),
        ])  # fmt: skip
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **NAMED[form]}
    template = TEMPLATES.get(form) if template == "" else template
    files = {"tokenizer.json": tokenizer.to_str(), "tokenizer_config.json": config}
    if template is not None:
        files["chat_template.jinja"] = template
    if form == "llama3":
        files["generation_config.json"] = {
            "eos_token_id": [tokenizer.token_to_id(t) for t in ("<|end_of_text|>", "<|eot_id|>")]
        }
    return write_json(folder, files)


def sentencepiece_model(
    model: str, *, texts=TEXTS, vocab_size: int = 600, dummy_prefix: bool = True, symbols: tuple[str, ...] = ()
) -> bytes:
    """Returns a `.model` as Llama 2, Mistral (BPE, a blank in front) or Gemma (symbols, no blank) publish them."""
    writer = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=writer, model_type=model, vocab_size=vocab_size,
        hard_vocab_limit=False, byte_fallback=True, normalization_rule_name="identity", add_dummy_prefix=dummy_prefix,
        remove_extra_whitespaces=False, allow_whitespace_only_pieces=True, split_digits=True, num_threads=1,
        user_defined_symbols=list(symbols), minloglevel=2,
    )  # fmt: skip
    return writer.getvalue()
