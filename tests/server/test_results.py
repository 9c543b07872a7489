from __future__ import annotations

import base64
import json
import wave
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load, load_file

from mstar.client.results import Outputs as ClientOutputs
from mstar.client.results import read_output
from mstar.server.results import Outputs, Result, chunk_event
from mstar.types import AudioChunk, Chunk, ImageChunk, ProgressChunk, Request, TensorChunk, TextChunk


def make(*outputs: str, indices: dict[int, str] | None = None) -> tuple[Outputs, Result]:
    request = Request(id="r", model="m", task="t", parts=(), outputs=outputs)
    result = Result(
        finish_reason="stop", indices=indices or {0: "stop"}, usage={"prompt_tokens": 1}, counts={},
        counters={"a.b": 2}, prompt_token_ids=[5], seed=7, timings={"total_s": 1.0}, extra={"more": 1},
    )  # fmt: skip
    return Outputs(request), result


def test_chunks_are_joined_in_json() -> None:
    outputs, result = make("text", "audio", "tensors")
    for chunk in (
        TextChunk("a", (1,)), AudioChunk(np.full(2, 0.5, np.float32), 8000), TextChunk("b", (2,)),
        AudioChunk(np.zeros(1, np.float32), 8000), TensorChunk("z", torch.ones(1, 2)),
        TensorChunk("z", torch.zeros(2, 2)),
    ):  # fmt: skip
        outputs.add(chunk)
    body = msgspec.json.decode(outputs.as_json(result))
    assert (body["id"], body["model"], body["task"], body["seed"], body["more"]) == ("r", "m", "t", 7, 1)
    assert body["finish_reason"] == "stop" and body["prompt_token_ids"] == [5] and body["counters"] == {"a.b": 2}
    text, sound, z = body["outputs"]
    assert text == {"type": "text", "text": "ab", "token_ids": [1, 2]}
    assert base64.b64decode(sound["data"])[:4] == b"RIFF" and sound["sample_rate"] == 8000
    assert (z["name"], z["shape"]) == ("z", [3, 2])


def test_each_of_n_outputs_says_which_it_is() -> None:
    outputs, result = make("text", indices={0: "stop", 1: "length"})
    outputs.add(TextChunk("a", (1,)))
    outputs.add(TextChunk("b", (2,), index=1))
    found = msgspec.json.decode(outputs.as_json(result))["outputs"]
    assert [(o["text"], o["index"], o["finish_reason"]) for o in found] == [("a", 0, "stop"), ("b", 1, "length")]


def test_empty_texts_are_outputs_too() -> None:
    outputs, result = make("text", indices={0: "stop", 1: "stop", 2: "length"})
    outputs.add(TextChunk("b", (2,), index=1))
    found = msgspec.json.decode(outputs.as_json(result))["outputs"]
    assert [(o["text"], o["index"], o["finish_reason"]) for o in found] == [
        ("", 0, "stop"), ("b", 1, "stop"), ("", 2, "length"),
    ]  # fmt: skip
    outputs, result = make("text")
    assert msgspec.json.decode(outputs.as_json(result))["outputs"] == [{"type": "text", "text": "", "token_ids": []}]
    outputs, result = make("audio")
    assert msgspec.json.decode(outputs.as_json(result))["outputs"] == []


def test_files_are_written_under_names_of_ours(tmp_path: Path) -> None:
    outputs, result = make("audio", "image", "tensor:z")
    outputs.add(AudioChunk(np.full(3, 0.5, np.float32), 24000))
    outputs.add(ImageChunk(np.zeros((4, 4, 3), np.uint8)))
    outputs.add(TensorChunk("z", torch.ones(2)))
    outputs.write(tmp_path / "out", result)
    body = json.loads((tmp_path / "out" / "result.json").read_text())
    assert [entry["type"] for entry in body["outputs"]] == ["audio", "image", "tensor"]
    sound = body["outputs"][0]
    assert sound == {"type": "audio", "file": "audio.wav", "tensor": "audio", "sample_rate": 24000}
    with wave.open(str(tmp_path / "out" / sound["file"])) as file:
        assert file.getnframes() == 3
    tensors = load_file(tmp_path / "out" / "tensors.safetensors")
    assert tensors["audio"].tolist() == [0.5] * 3 and tensors["z"].tolist() == [1, 1]
    assert (tmp_path / "out" / "image-0.png").read_bytes().startswith(b"\x89PNG")


def test_numbers_stand_on_one_line_of_the_file_and_texts_stay_as_they_are(tmp_path: Path) -> None:
    outputs, result = make("text")
    said = "[\n1,\n2\n]"
    outputs.add(TextChunk(said, (5, 6, 7)))
    outputs.write(tmp_path, result)
    written = (tmp_path / "result.json").read_text()
    assert '"token_ids": [5, 6, 7]' in written and json.loads(written)["outputs"][0]["text"] == said


def test_one_safetensors_body_holds_the_result_too(tmp_path: Path) -> None:
    outputs, result = make("audio")
    outputs.add(AudioChunk(np.full(3, 0.5, np.float32), 24000))
    body = outputs.as_safetensors(result)
    assert load(body)["audio"].tolist() == [0.5] * 3
    (tmp_path / "x.safetensors").write_bytes(body)
    with safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        assert json.loads(file.metadata()["result"])["outputs"][0]["tensor"] == "audio"


def decode(chunk: Chunk) -> dict[str, Any]:
    (line,) = chunk_event(chunk).splitlines()
    event: dict[str, Any] = msgspec.json.decode(line)
    return event


def test_chunks_become_ndjson_events() -> None:
    assert decode(TextChunk("a\nb", (1, 2))) == {"event": "text", "text": "a\nb", "token_ids": [1, 2], "index": 0}
    assert decode(ProgressChunk(1, 5)) == {"event": "progress", "step": 1, "total": 5}
    event = decode(ImageChunk(np.zeros((2, 2, 3), np.uint8)))
    assert base64.b64decode(event["data"]).startswith(b"\x89PNG")
    event = decode(TensorChunk("z", torch.ones(2)))
    assert (event["name"], event["dtype"], event["shape"]) == ("z", "float32", [2])
    event = decode(AudioChunk(np.full(3, 0.5, np.float32), 8000))
    assert base64.b64decode(event["data"]) == b"\xff\x3f" * 3 and event["sample_rate"] == 8000


def test_parts_that_say_where_they_begin_are_joined_there() -> None:
    outputs, result = make("tensors")
    whole = torch.arange(24.0).reshape(2, 3, 4)
    for row, column in ((0, 2), (1, 0), (0, 0), (1, 1), (0, 1), (1, 2)):
        part = whole[row : row + 1, column : column + 1]
        outputs.add(TensorChunk("z", part, start=(row, column, 0)))
    (joined,) = outputs.joined()
    assert isinstance(joined, TensorChunk) and torch.equal(joined.tensor, whole) and not joined.start
    assert msgspec.json.decode(outputs.as_json(result))["outputs"][0]["shape"] == [2, 3, 4]
    client = ClientOutputs()
    for row, column in ((1, 2), (0, 0), (1, 0), (0, 2), (0, 1), (1, 1)):
        event = json.loads(chunk_event(TensorChunk("z", whole[row:, column:][:1, :1], start=(row, column, 0))))
        client.add(read_output(event, kind=event["event"]))
    (received,) = client.joined()
    assert np.array_equal(received.tensor, whole.numpy())
