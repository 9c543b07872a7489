"""Text to speech through the engine: against the originals' outputs, and that every frame is heard.

The oracles are the golden outputs, `transformers` and `snac`, and plain arithmetic on frames; never another run of the
engine, except where whole input is compared with its parts.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mstar_plugin_orpheus.modeling.frames import LEVEL_SLOTS, new_frames
from mstar_plugin_orpheus.processing import FADE_S, OrpheusProcessor
from mstar_plugin_orpheus.processing.segments import segment

FRAME = 2048
GREEDY = {"temperature": 0, "repetition_penalty": 1.0, "codec_noise": False}
STOP_EARLY = 45.0
"""Bias of the tiny model's stop token with which it ends after about half a token per token of the prompt."""
BAD_BIAS = 60.0
"""Bias with which a token that is no code is drawn now and then."""


def vocode(codes: Tensor, **params: Any) -> dict[str, Any]:
    tensor = {"dtype": "int64", "shape": [len(codes)], "data": base64.b64encode(codes.numpy()).decode()}
    part = {"type": "tensor", "name": "codes", "tensor": tensor}
    return {"task": "vocode", "inputs": [part], "outputs": ["audio", "tensors"], "params": params, "seed": 1}


@pytest.fixture(scope="module")
def golden_served(serving: Any, golden: Any) -> Iterator[Any]:
    with serving(golden.checkpoint.folder, max_model_len=256) as served:
        yield served


@pytest.fixture(scope="module")
def tiny_served(serving: Any, tiny_folder: Path) -> Iterator[Any]:
    with serving(tiny_folder, max_model_len=1024, kv_cache_memory_bytes=16 * 2**20) as served:
        yield served


@pytest.fixture(autouse=True)
def _left_clean(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    for name in {"golden_served", "tiny_served"} & set(request.fixturenames):
        request.getfixturevalue(name).assert_clean()


# ---- parity ---------------------------------------------------------------------------------------------


def test_prompt_ids_are_those_of_the_original(golden: Any, golden_served: Any, speech: Any) -> None:
    for given, right in zip(golden.inputs["prompts"], golden.answers["prompts"], strict=True):
        answer = golden_served.ask(speech(given["text"], voice=given["voice"], max_tokens=1, outputs=("tensor:codes",)))
        assert answer.result.prompt_token_ids == right["input_ids"]
        assert answer.result.usage == {"prompt_tokens": len(right["input_ids"]), "completion_tokens": 1}


@pytest.mark.parametrize("penalty", [1.0, 1.3])
@pytest.mark.parametrize("case", [0, 1])
def test_greedy_ids_are_those_of_the_original(
    golden: Any, golden_served: Any, speech: Any, case: int, penalty: float
) -> None:
    given, right = golden.inputs["prompts"][case], golden.answers[f"p{case}"]
    params = {**GREEDY, "repetition_penalty": penalty, "max_tokens": golden.inputs["max_new_tokens"]}
    answer = golden_served.ask(speech(given["text"], voice=given["voice"], **params))
    assert answer.ids == right["greedy_ids" if penalty == 1.0 else "rep_penalty_1_3_greedy_ids"]
    assert answer.result.finish_reason == "length"
    assert answer.result.counters["lm.decode"] == 84
    assert len(answer.samples) == 12 * FRAME


def test_ids_of_a_prompt_given_as_ids_are_the_same(golden: Any, golden_served: Any, speech: Any) -> None:
    answer = golden_served.ask(speech(golden.answers["prompts"][1]["input_ids"], **GREEDY, max_tokens=84))
    assert answer.ids == golden.answers["p1"]["greedy_ids"]


def assert_golden_audio(golden: Any, answer: Any) -> None:
    """The audio of the golden codes: interior chunks as the original streams them, the ends from its windows."""
    assert len(answer.samples) == 12 * FRAME
    interior = answer.pcm.reshape(12, FRAME)[1:10]
    assert np.abs(interior - golden.tensors["snac.stream.chunks_int16"].numpy()).max() <= 4
    first = golden.tensors["snac.stream.window_audio_float_first3"][0, : 2 * FRAME].numpy()
    assert np.abs(answer.samples[: 2 * FRAME] - first).max() <= 1e-4
    assert np.array_equal(answer.tensor("audio").numpy(), answer.samples)


def test_spoken_audio_is_that_of_the_original_streaming_decoder(golden: Any, golden_served: Any, speech: Any) -> None:
    given, base = golden.inputs["prompts"][0], golden.answers["special_ids"]["audio_base"]
    answer = golden_served.ask(speech(given["text"], voice=given["voice"], **GREEDY, max_tokens=84))
    codes = [token - base - 4096 * (index % 7) for index, token in enumerate(answer.ids)]
    assert codes == golden.codes.tolist()  # else the golden audio would be another's
    assert_golden_audio(golden, answer)


def test_vocoded_audio_is_that_of_the_original_streaming_decoder(golden: Any, golden_served: Any) -> None:
    answer = golden_served.ask(vocode(golden.codes, codec_noise=False))
    assert_golden_audio(golden, answer)
    assert answer.result.finish_reason == "stop"


def test_codec_noise_is_the_seeds(golden: Any, golden_served: Any) -> None:
    request = vocode(golden.codes[:35])
    first, again = golden_served.ask(request).samples, golden_served.ask(request).samples
    other = golden_served.ask({**request, "seed": 2}).samples
    quiet = golden_served.ask(vocode(golden.codes[:35], codec_noise=False)).samples
    assert np.array_equal(first, again)
    assert np.abs(first - other).max() > 0.01
    assert np.abs(first - quiet).max() > 0.01


# ---- a checkpoint of another size, against transformers and snac -----------------------------------------


CODEBOOK = 90
FRESH_FRAME = 4 * 3 * 5 * 2
FRESH_CODEC = {
    "sampling_rate": 16000, "encoder_dim": 2, "encoder_rates": [3, 5, 2], "latent_dim": None, "decoder_dim": 24,
    "decoder_rates": [5, 3, 2], "attn_window_size": None, "codebook_size": CODEBOOK, "codebook_dim": 5,
    "vq_strides": [4, 2, 1], "noise": True, "depthwise": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> tuple[Path, Any, Any]:
    """A checkpoint written by `transformers` and `snac`: its folder, the language model, the codec without noise."""
    snac, transformers = pytest.importorskip("snac"), pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("fresh")
    model, codec = folder / "model", folder / "snac_24khz"
    torch.manual_seed(8)
    audio_base = _audio_base(tiny_folder)
    vocab_size = audio_base + 7 * CODEBOOK + 5
    shape = transformers.LlamaConfig(
        vocab_size=vocab_size, hidden_size=60, intermediate_size=100, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=3, head_dim=14, rms_norm_eps=1e-6, max_position_embeddings=2048, tie_word_embeddings=False,
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "high_freq_factor": 4.0,
            "low_freq_factor": 1.0, "original_max_position_embeddings": 32,
        },
    )  # fmt: skip
    language = transformers.LlamaForCausalLM(shape).eval()
    for name, parameter in language.named_parameters():
        parameter.data = torch.randn_like(parameter) * (0.3 if parameter.dim() > 1 else 0.1) + ("norm" in name)
    _wire_slots(language, audio_base=audio_base)
    language.save_pretrained(model, max_shard_size="200KB")
    assert (model / "model.safetensors.index.json").exists()
    (model / "tokenizer.json").write_bytes((tiny_folder / "tokenizer.json").read_bytes())
    original = snac.SNAC(**FRESH_CODEC).eval()
    for parameter in original.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    codec.mkdir()
    (codec / "config.json").write_text(json.dumps(FRESH_CODEC))
    torch.save(original.state_dict(), codec / "pytorch_model.bin")
    for module in original.modules():
        if type(module).__name__ == "NoiseBlock":
            module.forward = lambda x: x
    return model, language, original


def _audio_base(folder: Path) -> int:
    added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    return int(next(token["id"] for token in added if token["content"] == "<custom_token_0>")) + 10


def _wire_slots(language: Any, *, audio_base: int) -> None:
    """Make the model emit slot after slot: a token's slot is a dimension that no layer writes to."""
    embedding, head = language.model.embed_tokens.weight.data, language.lm_head.weight.data
    slots = torch.arange(7 * CODEBOOK) // CODEBOOK
    ids = audio_base + torch.arange(7 * CODEBOOK)
    embedding[:, :7], head[:, :7] = 0.0, 0.0
    embedding[:, 6] = 3.0
    embedding[ids, 6] = 0.0
    embedding[ids, slots] = 3.0
    head[ids, (slots - 1) % 7] = 100.0
    for layer in language.model.layers:
        layer.self_attn.o_proj.weight.data[:7] = 0.0
        layer.mlp.down_proj.weight.data[:7] = 0.0


def snac_windows(codec: Any, codes: Tensor) -> Tensor:
    """codes (n,), four frames or more -> what the original decoder makes of each window, every frame heard once."""
    frames = codes.view(-1, 7)
    heard = []
    for first in range(len(frames) - 3):
        window = frames[None, first : first + 4]
        with torch.inference_mode():
            audio = codec.decode([window[:, :, list(slots)].flatten(1) for slots in LEVEL_SLOTS])[0, 0]
        start = 0 if first == 0 else FRESH_FRAME
        end = 4 * FRESH_FRAME if first == len(frames) - 4 else 2 * FRESH_FRAME
        heard.append(audio[start:end])
    return torch.cat(heard)


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_a_fresh_checkpoint_speaks_as_transformers_and_snac_do(
    serving: Any, speech: Any, originals: tuple[Path, Any, Any], penalty: float
) -> None:
    folder, language, codec = originals
    base, steps = _audio_base(folder), 63
    with serving(folder, max_model_len=256, block_size=8, max_num_batched_tokens=11) as served:
        params = {**GREEDY, "repetition_penalty": penalty, "max_tokens": steps}
        answer = served.ask(speech("The quick brown fox, and so on; once more.", **params))
        served.assert_clean()
    prompt = torch.tensor([answer.result.prompt_token_ids])
    with torch.inference_mode():
        right = language.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=steps, do_sample=False, pad_token_id=0,
            repetition_penalty=penalty, eos_token_id=1, output_scores=True, return_dict_in_generate=True,
        )  # fmt: skip
    best = torch.stack([scores[0].topk(2).values for scores in right.scores])
    assert (best[:, 0] - best[:, 1]).min() > 1e-3, "a near tie: another seed makes a better test"
    expected = right.sequences[0, prompt.shape[1] :]
    assert answer.ids == expected.tolist()
    codes = expected - base - CODEBOOK * (torch.arange(steps) % 7)
    assert answer.samples.shape == (9 * FRESH_FRAME,)
    assert np.abs(answer.samples - snac_windows(codec, codes).numpy()).max() <= 1e-4
    assert answer.sample_rates == {16000}


# ---- every frame is heard -------------------------------------------------------------------------------


@pytest.mark.parametrize("num_frames", range(1, 7))
def test_n_frames_are_n_times_2048_samples(tiny_served: Any, speech: Any, num_frames: int) -> None:
    answer = tiny_served.ask(speech("Hello there.", max_tokens=7 * num_frames + 3))
    assert len(answer.ids) == 7 * num_frames
    assert len(answer.samples) == num_frames * FRAME
    assert answer.result.finish_reason == "length"
    assert answer.result.usage["completion_tokens"] == 7 * num_frames + 3


@pytest.mark.parametrize("text", ["Hi.", "A", "<laugh>", "1", "é"])
def test_short_inputs_speak_and_end_by_themselves(tiny_served: Any, speech: Any, text: str) -> None:
    answer = tiny_served.ask(speech(text))
    assert answer.result.finish_reason == "stop"
    assert len(answer.samples) > 0.2 * 24000
    assert np.abs(answer.samples).max() > 0.01
    assert len(answer.samples) * 7 == len(answer.ids) * FRAME
    assert answer.result.usage["completion_tokens"] == len(answer.ids) + 1  # the stop token


def test_less_than_a_frame_is_an_output_without_samples(tiny_served: Any, speech: Any) -> None:
    answer = tiny_served.ask(speech("Hello there.", max_tokens=6))
    assert answer.result.finish_reason == "length"
    assert answer.ids == [] and len(answer.samples) == 0


def test_the_limit_of_the_model_ends_speech_as_a_limit_does(serving: Any, tiny_folder: Path, speech: Any) -> None:
    with serving(tiny_folder, max_model_len=64) as served:
        answer = served.ask(speech("Hello there.", ignore_eos=True))
        assert answer.result.finish_reason == "length"
        assert len(answer.result.prompt_token_ids) + answer.result.usage["completion_tokens"] == 64
        served.assert_clean()


@pytest.mark.parametrize("code", [0, 4095])
def test_codes_0_and_4095_are_codes(golden: Any, golden_served: Any, speech: Any, code: int) -> None:
    base = golden.answers["special_ids"]["audio_base"]
    bias = {str(base + 4096 * slot + code): 30.0 for slot in range(7)}
    answer = golden_served.ask(speech("Zero.", **GREEDY, max_tokens=42, logit_bias=bias))
    assert answer.ids == [base + 4096 * slot + code for slot in range(7)] * 6
    assert answer.result.counts.get("skipped_codes", 0) == 0
    assert len(answer.samples) == 6 * FRAME
    vocoded = golden_served.ask(vocode(torch.full((42,), code), codec_noise=False))
    assert np.abs(answer.pcm - vocoded.pcm).max() <= 2


@pytest.mark.parametrize("code", [0, 4095])
def test_codes_0_and_4095_sound_as_their_windows_do_in_every_slot(golden: Any, golden_served: Any, code: int) -> None:
    snac = pytest.importorskip("snac")
    original = snac.SNAC.from_pretrained(str(golden.checkpoint.parts["snac_24khz"]))
    for module in original.modules():
        if type(module).__name__ == "NoiseBlock":
            module.forward = lambda x: x
    codes = golden.codes[:49].clone()
    codes[torch.arange(7) * 8] = code  # one in each frame, and in each slot
    answer = golden_served.ask(vocode(codes, codec_noise=False))
    frames, expected = codes.view(7, 7), []
    for first in range(4):
        window = frames[None, first : first + 4]
        with torch.inference_mode():
            audio = original.decode([window[:, :, list(slots)].flatten(1) for slots in LEVEL_SLOTS])[0, 0]
        start, end = new_frames(num_frames=4, num_new_frames=1, first=first == 0, final=first == 3)
        expected.append(audio[start * FRAME : end * FRAME])
    assert len(answer.samples) == 7 * FRAME
    assert np.abs(answer.samples - torch.cat(expected).numpy()).max() <= 1e-4


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_bad_codes_cost_their_frames_and_are_counted(tiny_served: Any, speech: Any, penalty: float) -> None:
    params = {"temperature": 1.0, "repetition_penalty": penalty, "top_p": 1.0, "codec_noise": False}
    answer = tiny_served.ask(speech("Hello there.", max_tokens=100, logit_bias={"65": BAD_BIAS}, **params))
    num_good, num_bad = len(answer.ids), answer.result.counts["skipped_codes"]
    assert num_bad >= 2 and num_good >= 35
    whole = num_good + num_bad
    assert answer.result.usage["completion_tokens"] == 100
    assert 94 <= whole <= 100  # the frame begun last is not finished
    slots = [(token - tiny_served.audio_base) // 4096 for token in answer.ids]
    assert slots == [index % 7 for index in range(num_good)]
    assert len(answer.samples) == num_good // 7 * FRAME
    base = tiny_served.audio_base
    codes = torch.tensor(answer.ids) - base - 4096 * (torch.arange(num_good) % 7)
    assert np.abs(answer.pcm - tiny_served.ask(vocode(codes, codec_noise=False)).pcm).max() <= 2


# ---- segments -------------------------------------------------------------------------------------------


def faded(parts: list[np.ndarray]) -> np.ndarray:
    """Segments joined: each fades in after another and out before another, and none loses or gains a sample."""
    width = round(FADE_S * 24000)
    ramp = np.sin(0.5 * np.pi * (np.arange(width) + 0.5) / width) ** 2
    joined = []
    for number, part in enumerate(parts):
        part = part.copy()
        if number > 0:
            part[:width] *= ramp
        if number < len(parts) - 1:
            part[-width:] *= ramp[::-1]
        joined.append(part)
    return np.concatenate(joined)


@pytest.mark.parametrize("is_budgeted", [False, True])
def test_segments_are_spoken_in_order_and_join_without_clicks(
    tiny_served: Any, speech: Any, long_text: Callable[[int], str], is_budgeted: bool
) -> None:
    text = long_text(750)
    parts = segment(text)
    assert len(parts) == 3
    more = {"max_tokens": 100_000} if is_budgeted else {}
    params = {**GREEDY, "logit_bias": {str(tiny_served.stop): STOP_EARLY}, **more}
    whole = tiny_served.ask(speech(text, **params))
    alone = [tiny_served.ask(speech(part, **params)) for part in parts]
    assert whole.result.finish_reason == "stop"
    assert whole.ids == [token for answer in alone for token in answer.ids]
    assert all(len(answer.samples) >= 5 * FRAME for answer in alone)
    expected = faded([answer.samples for answer in alone])
    assert whole.samples.shape == expected.shape
    assert np.abs(whole.samples - expected).max() <= 2 / 32767
    ends = np.cumsum([len(answer.samples) for answer in alone])[:-1]
    for end in ends:
        around = whole.samples[end - 3 : end + 3]
        assert np.abs(around).max() < 0.02  # silence where they meet
        assert np.abs(np.diff(around)).max() < 0.02


def test_segments_share_one_budget_in_order(tiny_served: Any, speech: Any, long_text: Callable[[int], str]) -> None:
    text = long_text(750)
    params = {**GREEDY, "logit_bias": {str(tiny_served.stop): STOP_EARLY}}
    whole = tiny_served.ask(speech(text, **params))
    first = tiny_served.ask(speech(segment(text)[0], **params))
    limit = len(first.ids) + 1 + 20
    cut = tiny_served.ask(speech(text, **params, max_tokens=limit))
    assert cut.result.finish_reason == "length"
    assert cut.result.usage["completion_tokens"] == limit
    assert cut.ids == whole.ids[: len(first.ids) + 14]
    assert len(cut.samples) == (len(first.ids) // 7 + 2) * FRAME


def test_three_thousand_characters_are_spoken_whole(
    tiny_served: Any, speech: Any, long_text: Callable[[int], str]
) -> None:
    text = long_text(3000)
    params = {**GREEDY, "voice": "leo", "logit_bias": {str(tiny_served.stop): STOP_EARLY}}
    whole = tiny_served.ask(speech(text, **params))
    prompts = split_prompts(whole.result.prompt_token_ids, tiny_served.processor)
    said = [spoken.removeprefix("leo: ") for spoken in prompts]
    assert all(spoken.startswith("leo: ") for spoken in prompts)
    assert " ".join(" ".join(said).split()) == " ".join(text.split())
    assert len(said) >= 10 and all(re.search(r"[.?!…,]$", part) for part in said)
    alone = tiny_served.ask_all([speech(part, **params, outputs=("tensor:codes",)) for part in said])
    assert whole.ids == [token for answer in alone for token in answer.ids]
    assert all(len(answer.ids) >= 7 for answer in alone)
    assert len(whole.samples) == len(whole.ids) // 7 * FRAME
    assert whole.result.finish_reason == "stop"
    assert whole.result.usage["completion_tokens"] == len(whole.ids) + len(said)


def split_prompts(ids: list[int], processor: OrpheusProcessor) -> list[str]:
    """What each of the prompts in `ids` says."""
    tokens, said, text = processor.config.tokens, [], None
    for token in ids:
        if token == tokens.begin_of_text:
            text = []
        elif token == tokens.end_of_turn:
            assert text is not None
            said.append(processor.tokenizer.decode(text))
            text = None
        elif text is not None:
            text.append(token)
    return said
