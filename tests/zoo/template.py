"""Chat templates in the manner of the real families, with the turns to be learned from each.

A template is a rendering; `Template.turns` says in plain Python what the assistant's turns look like in it, end token
included, so that a mask can be compared with a result that was not computed by rendering.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Message = Mapping[str, Any]
Turns = Callable[[Sequence[Message], Mapping[str, Any]], list[str]]


@dataclass(frozen=True)
class Template:
    """One family's template and its special tokens."""

    name: str
    source: str
    special_tokens: tuple[str, ...]  #: in the vocabulary and never split; bos, eos and pad among them
    bos_token: str | None
    eos_token: str
    pad_token: str | None
    turns: Turns = field(repr=False)
    takes_system: bool = True
    takes_tools: bool = False
    takes_reasoning: bool = False
    takes_any_order: bool = False  #: roles need not alternate
    kwargs: tuple[Mapping[str, Any], ...] = ({},)  #: chat_template_kwargs worth trying


def _text(message: Message) -> str:
    return message.get("content") or ""


def _call(tool_call: Mapping[str, Any]) -> str:
    function = tool_call["function"]
    return json.dumps({"name": function["name"], "arguments": function["arguments"]}, ensure_ascii=False)


def _plain(end: str, *, lead: str = "", trim: bool = False) -> Turns:
    """Return the turns of a template that shows the content and the end token, nothing else."""

    def turns(messages: Sequence[Message], kwargs: Mapping[str, Any]) -> list[str]:
        texts = [_text(message) for message in messages if message["role"] == "assistant"]
        return [lead + (text.strip() if trim else text) + end for text in texts]

    return turns


# --- ChatML: a default system prompt, tools in Hermes' manner ---------------------------------------------------------

CHATML_SOURCE = """\
{%- if messages[0].role != 'system' -%}
{{- '<|im_start|>system\\nYou are a careful assistant.<|im_end|>\\n' -}}
{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'tool' -%}
{{- '<|im_start|>tool\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' -}}
{%- else -%}
{{- '<|im_start|>' + m.role + '\\n' -}}
{{- m.content if m.content else '' -}}
{%- for call in (m.tool_calls or []) -%}
{%- if m.content or not loop.first -%}{{- '\\n' -}}{%- endif -%}
{%- set called = {'name': call.function.name, 'arguments': call.function.arguments} -%}
{{- '<tool_call>\\n' + called | tojson + '\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def _chatml_turn(message: Message) -> str:
    calls = [f"<tool_call>\n{_call(call)}\n</tool_call>" for call in message.get("tool_calls") or []]
    return "\n".join(part for part in [_text(message), *calls] if part) + "<|im_end|>"


def _chatml_turns(messages: Sequence[Message], kwargs: Mapping[str, Any]) -> list[str]:
    return [_chatml_turn(message) for message in messages if message["role"] == "assistant"]


CHATML = Template(
    name="chatml",
    source=CHATML_SOURCE,
    special_tokens=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    bos_token=None,
    eos_token="<|im_end|>",
    pad_token="<|endoftext|>",
    turns=_chatml_turns,
    takes_tools=True,
    takes_any_order=True,
)

# --- Qwen3's manner: reasoning before the last user turn is dropped, empty tags are added after it --------------------

QWEN3_SOURCE = """\
{%- if tools -%}
{{- '<|im_start|>system\\n' -}}
{%- if messages[0].role == 'system' -%}{{- messages[0].content + '\\n\\n' -}}{%- endif -%}
{{- 'Tools:' -}}{%- for tool in tools -%}{{- '\\n' + tool | tojson -}}{%- endfor -%}{{- '<|im_end|>\\n' -}}
{%- elif messages[0].role == 'system' -%}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' -}}
{%- endif -%}
{%- set seen = namespace(last_user=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set seen.last_user = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{%- set content = m.content if m.content is string else '' -%}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) -%}
{{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' -}}
{%- elif m.role == 'tool' -%}
{%- if loop.first or loop.previtem.role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' -}}
{%- if loop.last or loop.nextitem.role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
{%- elif m.role == 'assistant' -%}
{%- set reasoning = '' -%}
{%- if m.reasoning_content is string -%}
{%- set reasoning = m.reasoning_content -%}
{%- elif '</think>' in content -%}
{%- set reasoning = content.split('</think>')[0].split('<think>')[-1] -%}
{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if loop.index0 > seen.last_user and (loop.last or reasoning) -%}
{{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') -}}
{%- else -%}
{{- content -}}
{%- endif -%}
{%- for call in (m.tool_calls or []) -%}
{%- if content or not loop.first -%}{{- '\\n' -}}{%- endif -%}
{%- set called = {'name': call.function.name, 'arguments': call.function.arguments} -%}
{{- '<tool_call>\\n' + called | tojson + '\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if enable_thinking is defined and enable_thinking is false -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}
{%- endif -%}
"""

_NO_THOUGHT = "<think>\n\n</think>\n\n"


def _qwen3_turns(messages: Sequence[Message], kwargs: Mapping[str, Any]) -> list[str]:
    last_user = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)
    found = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        content, reasoning = _text(message), message.get("reasoning_content") or ""
        if not isinstance(message.get("reasoning_content"), str) and "</think>" in content:
            reasoning = content.split("</think>")[0].split("<think>")[-1]
            content = content.split("</think>")[-1].lstrip("\n")
        calls = [f"<tool_call>\n{_call(call)}\n</tool_call>" for call in message.get("tool_calls") or []]
        thought = ""
        if i > last_user and (i == len(messages) - 1 or reasoning):
            thought = "<think>\n" + reasoning.strip("\n") + "\n</think>\n\n"
            shown = content.lstrip("\n")
        else:
            shown = content
        if kwargs.get("enable_thinking") is False:  # the generation prompt has written the empty tags already
            thought = thought.removeprefix(_NO_THOUGHT)
        # The template tests the content before trimming it.
        joined = shown + ("\n" if content and calls else "") + "\n".join(calls)
        found.append(thought + joined + "<|im_end|>")
    return found


QWEN3 = Template(
    name="qwen3",
    source=QWEN3_SOURCE,
    special_tokens=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    bos_token=None,
    eos_token="<|im_end|>",
    pad_token="<|endoftext|>",
    turns=_qwen3_turns,
    takes_tools=True,
    takes_reasoning=True,
    takes_any_order=True,
    kwargs=({}, {"enable_thinking": False}, {"enable_thinking": True}),
)

# --- Llama-2's manner: the system prompt inside the first user turn, everything trimmed, a leading space --------------

LLAMA2_SOURCE = """\
{%- set start = 0 -%}{%- set system = '' -%}
{%- if messages[0].role == 'system' -%}
{%- set start = 1 -%}{%- set system = '<<SYS>>\\n' + messages[0].content + '\\n<</SYS>>\\n\\n' -%}
{%- endif -%}
{%- for m in messages[start:] -%}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}
{{- raise_exception('roles must alternate user and assistant') -}}
{%- endif -%}
{%- if m.role == 'user' -%}
{{- bos_token + '[INST] ' + ((system + m.content) if loop.first else m.content) | trim + ' [/INST]' -}}
{%- elif m.role == 'assistant' -%}
{{- ' ' + m.content | trim + ' ' + eos_token -}}
{%- endif -%}
{%- endfor -%}
"""

LLAMA2 = Template(
    name="llama2",
    source=LLAMA2_SOURCE,
    special_tokens=("<unk>", "<s>", "</s>"),
    bos_token="<s>",
    eos_token="</s>",
    pad_token=None,
    turns=_plain(" </s>", lead=" ", trim=True),
)

# --- Llama-3's manner: header ids ------------------------------------------------------------------------------------

LLAMA3_SOURCE = """\
{{- bos_token -}}
{%- for m in messages -%}
{%- set role = 'ipython' if m.role == 'tool' else m.role -%}
{{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' -}}
{%- if m.tool_calls -%}
{%- set call = m.tool_calls[0].function -%}
{{- {'name': call.name, 'parameters': call.arguments} | tojson -}}
{%- else -%}
{{- m.content | trim -}}
{%- endif -%}
{{- '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}
"""


def _llama3_turns(messages: Sequence[Message], kwargs: Mapping[str, Any]) -> list[str]:
    found = []
    for message in messages:
        if message["role"] == "assistant" and message.get("tool_calls"):
            call = message["tool_calls"][0]["function"]
            shown = json.dumps({"name": call["name"], "parameters": call["arguments"]}, ensure_ascii=False)
            found.append(shown + "<|eot_id|>")
        elif message["role"] == "assistant":
            found.append(_text(message).strip() + "<|eot_id|>")
    return found


LLAMA3 = Template(
    name="llama3",
    source=LLAMA3_SOURCE,
    special_tokens=(
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
        "<|finetune_right_pad_id|>",
    ),
    bos_token="<|begin_of_text|>",
    eos_token="<|end_of_text|>",  # as in the base models: not the end of a turn
    pad_token="<|finetune_right_pad_id|>",
    turns=_llama3_turns,
    takes_tools=True,
    takes_any_order=True,
)

# --- Mistral's manner: tool calls behind a special token, no content beside them --------------------------------------

MISTRAL_SOURCE = """\
{%- if messages[0].role == 'system' -%}
{%- set system = messages[0].content -%}{%- set rest = messages[1:] -%}
{%- else -%}
{%- set system = none -%}{%- set rest = messages -%}
{%- endif -%}
{{- bos_token -}}
{%- if tools -%}{{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' -}}{%- endif -%}
{%- for m in rest -%}
{%- if m.role == 'user' -%}
{%- if loop.last and system -%}
{{- '[INST] ' + system + '\\n\\n' + m.content + '[/INST]' -}}
{%- else -%}
{{- '[INST] ' + m.content + '[/INST]' -}}
{%- endif -%}
{%- elif m.tool_calls -%}
{{- '[TOOL_CALLS] [' -}}
{%- for call in m.tool_calls -%}
{{- {'name': call.function.name, 'arguments': call.function.arguments} | tojson -}}
{%- if not loop.last -%}{{- ', ' -}}{%- endif -%}
{%- endfor -%}
{{- ']' + eos_token -}}
{%- elif m.role == 'assistant' -%}
{{- ' ' + m.content + eos_token -}}
{%- elif m.role == 'tool' -%}
{{- '[TOOL_RESULTS] {"content": ' + m.content | tojson + '}[/TOOL_RESULTS]' -}}
{%- else -%}
{{- raise_exception('only user, assistant and tool roles are supported') -}}
{%- endif -%}
{%- endfor -%}
"""


def _mistral_turns(messages: Sequence[Message], kwargs: Mapping[str, Any]) -> list[str]:
    found = []
    for message in messages:
        if message["role"] == "assistant" and message.get("tool_calls"):
            found.append("[TOOL_CALLS] [" + ", ".join(map(_call, message["tool_calls"])) + "]</s>")
        elif message["role"] == "assistant":
            found.append(" " + _text(message) + "</s>")
    return found


MISTRAL = Template(
    name="mistral",
    source=MISTRAL_SOURCE,
    special_tokens=(
        "<unk>",
        "<s>",
        "</s>",
        "[INST]",
        "[/INST]",
        "[TOOL_CALLS]",
        "[AVAILABLE_TOOLS]",
        "[/AVAILABLE_TOOLS]",
        "[TOOL_RESULTS]",
        "[/TOOL_RESULTS]",
    ),
    bos_token="<s>",
    eos_token="</s>",
    pad_token=None,
    turns=_mistral_turns,
    takes_tools=True,
    takes_any_order=True,
)

# --- Gemma's manner: the assistant is called model, the system prompt goes into the first user turn -------------------

GEMMA_SOURCE = """\
{{- bos_token -}}
{%- if messages[0].role == 'system' -%}
{%- set lead = messages[0].content | trim + '\\n\\n' -%}{%- set rest = messages[1:] -%}
{%- else -%}
{%- set lead = '' -%}{%- set rest = messages -%}
{%- endif -%}
{%- for m in rest -%}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') -}}
{%- endif -%}
{%- set role = 'model' if m.role == 'assistant' else m.role -%}
{{- '<start_of_turn>' + role + '\\n' + (lead if loop.first else '') + m.content | trim + '<end_of_turn>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}
"""

GEMMA = Template(
    name="gemma",
    source=GEMMA_SOURCE,
    special_tokens=("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"),
    bos_token="<bos>",
    eos_token="<eos>",
    pad_token="<pad>",
    turns=_plain("<end_of_turn>", trim=True),
)

# --- Phi-3's manner: a document end after the last turn, where no answer is asked for ---------------------------------

PHI3_SOURCE = """\
{%- for m in messages -%}
{{- '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- else -%}{{- eos_token -}}{%- endif -%}
"""

PHI3 = Template(
    name="phi3",
    source=PHI3_SOURCE,
    special_tokens=("<unk>", "<s>", "<|endoftext|>", "<|assistant|>", "<|system|>", "<|user|>", "<|end|>"),
    bos_token="<s>",
    eos_token="<|endoftext|>",
    pad_token="<|endoftext|>",
    turns=_plain("<|end|>"),
    takes_any_order=True,
)

# --- DeepSeek-R1's manner: the prompt opens the reasoning, the history keeps what follows it --------------------------

DEEPSEEK_R1_SOURCE = """\
{{- bos_token -}}
{%- for m in messages if m.role == 'system' -%}{{- m.content -}}{%- endfor -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}
{{- '<｜User｜>' + m.content -}}
{%- elif m.role == 'assistant' -%}
{%- set content = m.content -%}
{%- if '</think>' in content -%}{%- set content = content.split('</think>')[-1] -%}{%- endif -%}
{{- '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<｜Assistant｜><think>\\n' -}}{%- endif -%}
"""


def _deepseek_turns(messages: Sequence[Message], kwargs: Mapping[str, Any]) -> list[str]:
    texts = [_text(message) for message in messages if message["role"] == "assistant"]
    return [text.split("</think>")[-1] + "<｜end▁of▁sentence｜>" for text in texts]


DEEPSEEK_R1 = Template(
    name="deepseek_r1",
    source=DEEPSEEK_R1_SOURCE,
    special_tokens=("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>", "<｜User｜>", "<｜Assistant｜>"),
    bos_token="<｜begin▁of▁sentence｜>",
    eos_token="<｜end▁of▁sentence｜>",
    pad_token="<｜▁pad▁｜>",
    turns=_deepseek_turns,
    takes_any_order=True,
)

# --- Zephyr's manner: role tags that are ordinary text ---------------------------------------------------------------

ZEPHYR_SOURCE = """\
{%- for m in messages -%}
{{- '<|' + m.role + '|>\\n' + m.content + eos_token + '\\n' -}}
{%- if loop.last and add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}
{%- endfor -%}
"""

ZEPHYR = Template(
    name="zephyr",
    source=ZEPHYR_SOURCE,
    special_tokens=("<unk>", "<s>", "</s>"),
    bos_token="<s>",
    eos_token="</s>",
    pad_token="</s>",
    turns=_plain("</s>"),
    takes_any_order=True,
)

# --- One that does not know add_generation_prompt --------------------------------------------------------------------

NO_PROMPT_SOURCE = """\
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}
{%- endfor -%}
"""

NO_PROMPT = Template(
    name="no_prompt",
    source=NO_PROMPT_SOURCE,
    special_tokens=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    bos_token=None,
    eos_token="<|endoftext|>",
    pad_token="<|endoftext|>",
    turns=_plain("<|im_end|>"),
    takes_any_order=True,
)

# --- ChatML over a vocabulary that does not know its markers ---------------------------------------------------------

CHATML_PLAIN_SOURCE = """\
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

CHATML_PLAIN = Template(
    name="chatml_plain",
    source=CHATML_PLAIN_SOURCE,
    special_tokens=("<|endoftext|>",),
    bos_token="<|endoftext|>",
    eos_token="<|endoftext|>",
    pad_token=None,
    turns=_plain("<|im_end|>"),
    takes_any_order=True,
)

# --- One with the markers that most lack -----------------------------------------------------------------------------

GENERATION_SOURCE = """\
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{{- '<|assistant|>\\n' -}}{% generation %}{{- m.content + eos_token -}}{% endgeneration %}{{- '\\n' -}}
{%- else -%}
{{- '<|' + m.role + '|>\\n' + m.content + '\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}
"""

GENERATION = Template(
    name="generation",
    source=GENERATION_SOURCE,
    special_tokens=("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|pad|>"),
    bos_token="<|endoftext|>",
    eos_token="<|endoftext|>",
    pad_token="<|pad|>",
    turns=_plain("<|endoftext|>"),
    takes_any_order=True,
)

# --- No marker at all: words and line breaks -------------------------------------------------------------------------

WORDS_SOURCE = """\
{%- for m in messages -%}
{{- {'user': 'User', 'assistant': 'Assistant', 'system': 'System'}[m.role] + ': ' + m.content + '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'Assistant:' -}}{%- endif -%}
"""

WORDS = Template(
    name="words",
    source=WORDS_SOURCE,
    special_tokens=("<|endoftext|>",),
    bos_token=None,
    eos_token="<|endoftext|>",
    pad_token="<|endoftext|>",
    turns=_plain("", lead=" "),
    takes_any_order=True,
)

TEMPLATES: dict[str, Template] = {
    template.name: template
    for template in (
        CHATML,
        QWEN3,
        LLAMA2,
        LLAMA3,
        MISTRAL,
        GEMMA,
        PHI3,
        DEEPSEEK_R1,
        ZEPHYR,
        NO_PROMPT,
        CHATML_PLAIN,
        GENERATION,
        WORDS,
    )
}
