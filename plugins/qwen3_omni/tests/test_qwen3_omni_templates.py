"""A checkpoint whose chat template thinks and calls tools: prompts are those of `transformers`, and of what is written
thoughts and calls come out apart, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from asking import Asked, text, token_ids

from mstar.errors import RequestError
from mstar.types import Emission
from mstar_plugin_qwen3_omni.tiny import Sizes, write
from mstar_plugin_qwen3_omni.tiny.tokenizer import CHAT_TEMPLATE

MODEL = "thinks"
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
TEMPLATE = """\
{%- macro spelled(content) %}
{%- if content is string %}{{ content }}
{%- else %}{% for part in content or [] %}{{ part.text if part.type == 'text' else '' }}{% endfor %}{% endif %}
{%- endmacro %}
{%- set given = messages[0].role == 'system' %}
{%- if tools %}
{{- '<|im_start|>system\\n' + (spelled(messages[0].content) + '\\n\\n' if given else '') + 'Functions:\\n<tools>' }}
{%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
{{- '\\n</tools>\\nCall one by <tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call><|im_end|>\\n' }}
{%- elif given %}{{ '<|im_start|>system\\n' + spelled(messages[0].content) + '<|im_end|>\\n' }}{% endif %}
{%- set at = namespace(asked=0) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set at.asked = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user' if messages[loop.index0 - 1].role != 'tool' else '' }}
{{- '\\n<tool_response>\\n' + spelled(message.content) + '\\n</tool_response>' }}
{{- '<|im_end|>\\n' if loop.last or messages[loop.index0 + 1].role != 'tool' else '' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- if message.reasoning_content and loop.index0 > at.asked %}
{{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}{% endif %}
{{- spelled(message.content) }}
{%- for call in message.tool_calls or [] %}
{{- '\\n' if message.content or not loop.first else '' }}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\\n' }}
{%- elif message.role != 'system' or not loop.first %}
{{- '<|im_start|>' + message.role + '\\n' + spelled(message.content) + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""
"""Of the published kind: thoughts are opened for the assistant, or closed; earlier ones stay since the question."""

LOOK: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "The weather of a <city>",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
SUM: dict[str, Any] = {"type": "function", "function": {"name": "sum", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"city": "Köln"}}\n</tool_call>'
OPEN = {"chat_template_kwargs": {"enable_thinking": True}}
CLOSED = {"chat_template_kwargs": {"enable_thinking": False}}


def checkpoint(folder: Path, template: str) -> str:
    """The tiny checkpoint with another template, and with tags that are no control tokens, as in the release."""
    home = write(folder, Sizes())
    words = json.loads((home / "tokenizer.json").read_text())
    settings = json.loads((home / "tokenizer_config.json").read_text())
    for token in (*words["added_tokens"], *settings["added_tokens_decoder"].values()):
        token["special"] = token["content"] not in TAGS
    settings["additional_special_tokens"] = [
        token for token in settings["additional_special_tokens"] if token not in TAGS
    ]
    for name, value in (
        ("tokenizer.json", words), ("tokenizer_config.json", settings),
        ("chat_template.json", {"chat_template": template}),
    ):  # fmt: skip
        (home / name).write_text(json.dumps(value))
    return str(home)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return checkpoint(tmp_path_factory.mktemp("thinks"), TEMPLATE)


@pytest.fixture(scope="module")
def serving(folder: str) -> Iterator[Asked]:
    asked = Asked(plugin="qwen3_omni", model=folder, served_model_name=(MODEL,))
    yield asked
    asked.close()


@pytest.fixture(scope="module")
def peer(folder: str) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


Script = Callable[..., dict[str, Any]]


@pytest.fixture
def script(model: Asked, monkeypatch: pytest.MonkeyPatch) -> Script:
    """`script(said)`: what stands in the place of what a random model writes; gives fields that let it be whole.
    `spelled`: tags in it are not tokens of their own, but letters, byte by byte."""
    processor: Any = model.engine._processor
    words, decode = processor.reader.words, processor.decode
    written: dict[Any, Iterator[int]] = {}
    ids: list[int] = []

    def replaced(state: Any, emission: Emission) -> Any:
        if emission.name in ("text", "scored") and not emission.final:
            left = written.setdefault((id(state), emission.path), iter(ids))
            value = emission.value.clone().reshape(-1)
            value[0] = next(left)
            emission = replace(emission, value=value)
        return decode(state, emission)

    def write_down(said: str, *, spelled: bool = False) -> dict[str, Any]:
        written.clear()
        bytes_of = {words.spelling(token): token for token in range(256)}
        ids[:] = [bytes_of[bytes([one])] for one in said.encode()] if spelled else words.encode(said)
        return {"max_tokens": len(ids), "extra_body": {"ignore_eos": True}}

    monkeypatch.setattr(processor, "decode", replaced)
    return write_down


def asked(*, turns: list[Any] | None = None, extra_body: Any = None, **fields: Any) -> dict[str, Any]:
    messages = turns or [{"role": "user", "content": "How is the weather?"}]
    return {"model": MODEL, "messages": messages, "extra_body": extra_body or {}, **fields}


def streamed(client: openai.OpenAI, **fields: Any) -> tuple[str | None, str, list[Any], str | None, list[str]]:
    """(reasoning, content, calls, reason, the kinds of what came, in order), joined."""
    thought, said, calls, reason, kinds = "", "", list[Any](), None, list[str]()
    for chunk in client.chat.completions.create(**asked(**fields), stream=True):
        (choice,) = chunk.choices
        more = (choice.delta.model_extra or {}).get("reasoning_content") or ""
        thought, said, reason = thought + more, said + (choice.delta.content or ""), choice.finish_reason or reason
        calls += choice.delta.tool_calls or []
        kinds += [kind for kind, one in (("thought", more), ("said", choice.delta.content)) if one]
    return thought or None, said, calls, reason, kinds


def thought_of(message: Any) -> str | None:
    return (message.model_extra or {}).get("reasoning_content") or None


# ---- thoughts -------------------------------------------------------------------------------------------

THOUGHTS = [
    ("They ask\nfor rain.\n</think>\n\nIt räins.", {}, "They ask\nfor rain.", "It räins."),
    ("<think>\nHm <b> </thin.\n</think>\nYes.", OPEN, "Hm <b> </thin.", "Yes."),
    ("</think>\n\nYes.", {}, None, "Yes."),
    ("Never done </thi", {}, "Never done </thi", ""),
    ("No thought.", CLOSED, None, "No thought."),
    (" <think>\nAll the same</think>\n\nYes </think>.", CLOSED, "All the same", "Yes </think>."),
]


@pytest.mark.parametrize("spelled", [False, True])
@pytest.mark.parametrize(("said", "more", "thought", "answer"), THOUGHTS)
def test_thoughts_are_apart_from_the_answer(
    client: openai.OpenAI, script: Script, said: str, more: Any, thought: str | None, answer: str, spelled: bool
) -> None:
    fields = script(said, spelled=spelled)
    fields["extra_body"] |= more
    found = client.chat.completions.create(**asked(**fields))
    message = found.choices[0].message
    assert (thought_of(message), message.content or "") == (thought, answer)
    assert found.usage is not None and found.usage.completion_tokens == fields["max_tokens"]
    details = found.usage.completion_tokens_details
    assert (details is not None and bool(details.reasoning_tokens)) == (said != "No thought.")
    parted = streamed(client, **{**fields, **script(said, spelled=spelled), "extra_body": fields["extra_body"]})
    assert parted[:4] == (thought, answer, [], "length")
    assert parted[4] == sorted(parted[4], reverse=True)  # the thought, then the answer


def test_many_thoughts_and_their_logprobs(client: openai.OpenAI, script: Script, model: Asked) -> None:
    fields = script("One.</think>\n\nTwo three.")
    found = client.chat.completions.create(**asked(**fields, n=2, logprobs=True))
    for choice in found.choices:
        assert (choice.message.content, choice.message.model_extra) == ("Two three.", {"reasoning_content": "One."})
        assert choice.logprobs is not None
        assert "".join(one.token for one in choice.logprobs.content or ()).strip("\n") == "Two three."
    assert found.usage is not None and found.usage.completion_tokens_details is not None
    told = sum(len(choice.logprobs.content or ()) for choice in found.choices if choice.logprobs)
    assert found.usage.completion_tokens == found.usage.completion_tokens_details.reasoning_tokens + told  # type: ignore[operator]


def test_a_stop_string_ends_the_answer_not_the_thought(client: openai.OpenAI, script: Script) -> None:
    fields = script("A full stop. Yes.</think>It is. No?")
    message = client.chat.completions.create(**asked(**fields, stop=".")).choices[0].message
    assert (message.content, message.model_extra) == ("It is", {"reasoning_content": "A full stop. Yes."})


@pytest.mark.parametrize("enable", [None, True, False])
def test_thinking_is_asked_for_through_the_template(model: Asked, peer: Any, enable: bool | None) -> None:
    variables = {} if enable is None else {"enable_thinking": enable}
    turns = [{"role": "user", "content": "Hello."}]
    params = {"max_tokens": 1, "chat_template_kwargs": variables}
    found = model.ask(messages=turns, params=params).result.prompt_token_ids
    assert found == peer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False, **variables)


def test_thinking_is_refused_where_it_does_nothing(
    client: openai.OpenAI, model: Asked, tmp_path: Path, script: Script
) -> None:
    with pytest.raises(RequestError, match="token_ids pass by those") as caught:
        model.ask(token_ids([1, 2]), params={"chat_template_kwargs": {"enable_thinking": True}})
    assert caught.value.param == "params.chat_template_kwargs.enable_thinking"
    for wrong, param in (
        ({"enable_thinking": "no"}, "chat_template_kwargs.enable_thinking"),
        ({"thinking": True}, "chat_template_kwargs"),
    ):  # fmt: skip
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(**asked(extra_body={"chat_template_kwargs": wrong}))
        assert str(refused.value.param).startswith(param)
    plain = Asked(plugin="qwen3_omni", model=checkpoint(tmp_path, CHAT_TEMPLATE))
    try:
        with pytest.raises(RequestError, match="enable_thinking has no place in the model's chat template") as caught:
            plain.ask(text("Hello."), params={"chat_template_kwargs": {"enable_thinking": False}})
        assert caught.value.status == 400
    finally:
        plain.close()


def test_thoughts_are_not_spoken(client: openai.OpenAI) -> None:
    spoken = {"modalities": ["text", "audio"], "audio": {"voice": "ethan", "format": "wav"}, "max_tokens": 2}
    with pytest.raises(openai.BadRequestError, match="what it thinks is not spoken") as refused:
        client.chat.completions.create(**asked(**spoken))
    assert refused.value.param == "modalities"
    more = CLOSED | {"talker_max_tokens": 6, "ignore_eos": True}
    message = client.chat.completions.create(**asked(**spoken, extra_body=more)).choices[0].message
    assert message.audio is not None and message.audio.transcript == message.content


# ---- tools ----------------------------------------------------------------------------------------------


def called(number: int, name: str, arguments: str) -> dict[str, Any]:
    return {"id": f"c{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


HISTORY: list[dict[str, Any]] = [
    {"role": "system", "content": "Be <brief>."},
    {"role": "user", "content": "Rain in Köln, and 1 + 2?"},
    {
        "role": "assistant", "content": "I look.", "reasoning_content": "Both, then.",
        "tool_calls": [called(1, "look_up", '{"city":  "Köln"}'), called(2, "sum", '{"of": [1, 2]}')],
    },
    {"role": "tool", "tool_call_id": "c1", "content": '{"rain": "é"}'},
    {"role": "tool", "tool_call_id": "c2", "content": "3"},
    {"role": "assistant", "content": "Rain, and 3.", "reasoning_content": "Done."},
    {"role": "user", "content": "And in Ulm?"},
    {"role": "assistant", "content": "", "reasoning_content": "Ulm.", "tool_calls": [called(3, "look_up", "{}")]},
    {"role": "tool", "tool_call_id": "c3", "content": "Sun."},
]  # fmt: skip


@pytest.mark.parametrize("length", [2, 5, 6, 7, 9])
@pytest.mark.parametrize("tools", [[], [LOOK, SUM]])
def test_prompts_are_those_of_transformers(model: Asked, peer: Any, length: int, tools: list[Any]) -> None:
    turns = HISTORY[:length]
    found = model.ask(messages=turns, tools=tools, params={"max_tokens": 1}).result.prompt_token_ids
    right = peer.apply_chat_template(turns, tools=tools or None, add_generation_prompt=True, return_dict=False)
    assert found == right


def test_tools_of_chat_requests_reach_the_prompt(client: openai.OpenAI, peer: Any) -> None:
    def count(**fields: Any) -> int:
        found = client.chat.completions.create(**asked(turns=HISTORY, max_tokens=1, **fields))
        assert found.usage is not None
        return found.usage.prompt_tokens

    def right(tools: list[Any] | None) -> int:
        return len(peer.apply_chat_template(HISTORY, tools=tools, add_generation_prompt=True, return_dict=False))

    assert count(tools=[LOOK, SUM]) == count(tools=[LOOK, SUM], tool_choice="auto") == right([LOOK, SUM])
    assert count(tools=[LOOK, SUM], tool_choice="none") == count() == right(None)
    for choice in ("required", {"type": "function", "function": {"name": "sum"}}):
        with pytest.raises(openai.BadRequestError) as refused:
            count(tools=[LOOK, SUM], tool_choice=choice)
        assert refused.value.param == "tool_choice"


SAID = [
    (f"Rain, it seems.\n</think>\n\nI look.\n{CALL}\n{CALL}", "Rain, it seems.", "I look.", 2),
    (f"{CALL}?</think>{CALL}", f"{CALL}?", "", 1),
    ('</think>No: <tool_call>\n{"name": "look_up", "arguments": {]}\n</tool_call> or', None, None, 0),
    ('</think><tool_call>\n{"name": "look_up", "argu', None, None, 0),
    (f'</think><tool_call>[1]</tool_call>{CALL}', None, "<tool_call>[1]</tool_call>", 1),
]  # fmt: skip


@pytest.mark.parametrize("spelled", [False, True])
@pytest.mark.parametrize(("said", "thought", "content", "calls"), SAID)
def test_calls_come_out_of_the_answer_alone(
    client: openai.OpenAI,
    script: Script,
    said: str,
    thought: str | None,
    content: str | None,
    calls: int,
    spelled: bool,
) -> None:
    """What is no call in JSON stays text, letter by letter."""
    content = said.removeprefix("</think>") if content is None else content
    fields = script(said, spelled=spelled)
    choice = client.chat.completions.create(**asked(**fields, tools=[LOOK])).choices[0]
    message = choice.message
    assert (thought_of(message), message.content or "") == (thought, content)
    found = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]  # type: ignore[union-attr]
    assert found == [("look_up", {"city": "Köln"})] * calls
    parted = streamed(client, **{**fields, **script(said, spelled=spelled)}, tools=[LOOK])
    assert parted[:2] == (thought, content) and [call.index for call in parted[2]] == list(range(calls))
    assert [(call.function.name, call.function.arguments) for call in parted[2]] == [
        (call.function.name, call.function.arguments)  # type: ignore[union-attr]
        for call in message.tool_calls or ()
    ]


def test_an_answer_with_calls_may_be_sent_back(
    client: openai.OpenAI, model: Asked, peer: Any, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = script(f"Well.\n</think>\n\nI look.\n{CALL}")
    message = client.chat.completions.create(**asked(**fields, tools=[LOOK])).choices[0].message
    monkeypatch.undo()
    (call,) = message.tool_calls or ()
    turns = [*asked()["messages"], message.model_dump(exclude_none=True)]
    turns.append({"role": "tool", "tool_call_id": call.id, "content": "It rains."})
    usage = client.chat.completions.create(**asked(turns=turns, tools=[LOOK], max_tokens=1)).usage
    right = peer.apply_chat_template(turns, tools=[LOOK], add_generation_prompt=True, return_dict=False)
    assert usage is not None and usage.prompt_tokens == len(right)
    assert torch.tensor(right).tolist() == model.ask(
        messages=[{"role": "user", "content": "How is the weather?"},
                  {"role": "assistant", "content": message.content, "reasoning_content": "Well.",
                   "tool_calls": [call.model_dump()]},
                  turns[-1]],
        tools=[LOOK], params={"max_tokens": 1},
    ).result.prompt_token_ids  # fmt: skip
