"""A byte-level tokenizer in the form of the release's, and a chat template."""

from __future__ import annotations

from typing import Any

MERGES = [
    ("i", "n"), ("r", "e"), ("o", "n"), ("h", "e"), ("a", "t"), ("e", "r"), ("Ġ", "t"), ("Ġ", "a"), ("o", "u"),
    ("Ġt", "he"), ("Ġ", "s"), ("in", "g"), ("Ġ", "b"), ("Ġ", "w"), ("o", "r"), ("Ġ", "i"), ("e", "d"), ("Ġ", "o"),
    ("u", "s"), ("us", "er"), ("s", "y"), ("sy", "s"), ("t", "e"), ("te", "m"), ("sys", "tem"), ("a", "s"),
    ("as", "s"), ("i", "s"), ("ass", "is"), ("t", "a"), ("ta", "n"), ("tan", "t"), ("assis", "tant"),
]  # fmt: skip
SPECIAL_TOKENS = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>",
    "</think>", "<|audio_start|>", "<|audio_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>",
    "<tts_text_bos_single>", "<|audio_pad|>",
]  # fmt: skip
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% if messages[0].role == "system" %}{{ messages[0].content }}

{% endif %}# Tools

You may call these functions:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}To call one, write <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if not (tools and loop.first and message.role == "system") %}
{{- "<|im_start|>" + ("user" if message.role == "tool" else message.role) + "\\n" }}
{%- if message.role == "tool" %}{{ "<tool_response>\\n" }}{% endif %}
{%- if message.content is string %}{{ message.content }}
{%- elif message.content %}
{%- for part in message.content %}
{%- if part.type == "audio" %}<|audio_start|><|audio_pad|><|audio_end|>
{%- elif part.type == "image" %}<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == "video" %}<|vision_start|><|video_pad|><|vision_end|>
{%- else %}{{ part.text }}{% endif %}
{%- endfor %}
{%- endif %}
{%- for call in message.tool_calls or [] %}{% set called = call.function or call %}
{{- '<tool_call>{"name": "' + called.name + '", "arguments": ' }}
{{- called.arguments if called.arguments is string else called.arguments | tojson }}}</tool_call>
{%- endfor %}
{%- if message.role == "tool" %}{{ "\\n</tool_response>" }}{% endif %}
{{- "<|im_end|>\\n" }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\\n" }}{% endif %}"""


def tokenizer() -> dict[str, Any]:
    """Byte-level BPE in the Qwen2 form of tokenizer.json."""
    letters = [*_byte_letters(), *("".join(pair) for pair in MERGES)]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    added = [{"id": len(letters) + index, "content": content, **flags} for index, content in enumerate(SPECIAL_TOKENS)]
    split = {"type": "Split", "pattern": {"Regex": SPLIT}, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {letter: index for index, letter in enumerate(letters)},
            "merges": [list(pair) for pair in MERGES],
        },
    }


def ids_of(words: dict[str, Any]) -> dict[str, int]:
    """Every token's id."""
    return words["model"]["vocab"] | {token["content"]: token["id"] for token in words["added_tokens"]}


def settings(added: list[dict[str, Any]]) -> dict[str, Any]:
    """What tokenizer_config.json holds."""
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(token["id"]): {name: value for name, value in token.items() if name != "id"} for token in added
        },
        "additional_special_tokens": SPECIAL_TOKENS[1:],
        "audio_bos_token": "<|audio_start|>",
        "audio_eos_token": "<|audio_end|>",
        "audio_token": "<|audio_pad|>",
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "image_token": "<|image_pad|>",
        "model_max_length": 131072,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
        "video_token": "<|video_pad|>",
        "vision_bos_token": "<|vision_start|>",
        "vision_eos_token": "<|vision_end|>",
    }


def _byte_letters() -> list[str]:
    """One printable letter per byte, as byte-level BPE writes bytes; bytes that print stand for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) for byte in printable] + [chr(256 + index) for index in range(len(others))]
