from typing import Any

import numpy as np
import pytest
import torch

from mstar.errors import RequestError
from mstar.plugin.spec import Checkpoint, Limits
from mstar.types import AudioChunk, Chunk, Emission, Part, Request, TensorChunk, TensorPart, TextPart, TokensPart
from mstar_plugin_orpheus.plugin import CodecParams, SpeechParams
from mstar_plugin_orpheus.processing import OrpheusProcessor


@pytest.fixture(scope="module")
def processor(golden: Any) -> OrpheusProcessor:
    return OrpheusProcessor(golden.checkpoint, Limits(max_model_len=2048))


def speech(
    *parts: Part | str, outputs: tuple[str, ...] = ("audio",), params: SpeechParams | None = None, **given: Any
) -> Request:
    texts = tuple(TextPart(part) if isinstance(part, str) else part for part in parts)
    return Request(
        id="r", model="orpheus", task="speech", parts=texts, outputs=outputs, params=params or SpeechParams(**given)
    )


def vocode(codes: torch.Tensor) -> Request:
    return Request(
        id="r", model="orpheus", task="vocode", parts=(TensorPart("codes", codes),), outputs=("audio",),
        params=CodecParams(),
    )  # fmt: skip


# ---- prompts --------------------------------------------------------------------------------------------


def test_prompts_are_those_of_the_original(golden: Any, processor: OrpheusProcessor) -> None:
    for case, answer in zip(golden.inputs["prompts"], golden.answers["prompts"], strict=True):
        encoded = processor.encode(speech(case["text"], voice=case["voice"]))
        assert encoded.prompt_token_ids == answer["input_ids"]
        assert encoded.usage == {"prompt_tokens": len(answer["input_ids"])}
        assert encoded.sampler_prompts == {"main": [answer["input_ids"]]}
        (item,) = encoded.inputs["segments"]
        assert [*item["ids"].tolist(), item["last"].item()] == answer["input_ids"]
        assert item["limit"] == 2048 - len(answer["input_ids"])
        assert encoded.kv_tokens == {"lm.main": 2048}


def test_a_voice_left_out_is_the_first_and_null_is_none(processor: OrpheusProcessor) -> None:
    assert processor.encode(speech("Hi.")).prompt_token_ids == processor.prompt_ids("Hi.", voice="tara")
    assert processor.encode(speech("Hi.", voice=None)).prompt_token_ids == processor.prompt_ids("Hi.", voice=None)


def test_an_unknown_voice_is_refused_with_the_known_ones(processor: OrpheusProcessor) -> None:
    with pytest.raises(RequestError, match=r"'bob'.*tara, zoe, zac, jess, leo, mia, julia, leah") as caught:
        processor.encode(speech("Hi.", voice="bob"))
    assert (caught.value.status, caught.value.param) == (400, "voice")


def test_a_refused_voice_is_not_repeated_at_length(processor: OrpheusProcessor) -> None:
    with pytest.raises(RequestError, match="unknown voice 'xxx") as caught:
        processor.encode(speech("Hi.", voice="x" * 10_000))
    assert len(caught.value.message) < 300


def test_text_cannot_spell_control_tokens(golden: Any, processor: OrpheusProcessor) -> None:
    ids = processor.prompt_ids("a <|eot_id|> <custom_token_2> b", voice=None)
    assert max(ids[2:-4]) < golden.answers["special_ids"]["bos"]


def test_token_ids_are_the_whole_prompt(processor: OrpheusProcessor) -> None:
    assert processor.encode(speech(TokensPart([5, 6, 7]))).prompt_token_ids == [5, 6, 7]


@pytest.mark.parametrize("ids", [[], [5], [5, -1], [5, 28990]])
def test_token_ids_outside_the_vocabulary_are_refused(processor: OrpheusProcessor, ids: list[int]) -> None:
    with pytest.raises(RequestError) as caught:
        processor.encode(speech(TokensPart(ids)))
    assert caught.value.param == "inputs"


@pytest.mark.parametrize("texts", [("",), (" \n ",), ("", "\t")])
def test_blank_text_is_refused(processor: OrpheusProcessor, texts: tuple[str, ...]) -> None:
    with pytest.raises(RequestError, match="blank") as caught:
        processor.encode(speech(*texts))
    assert (caught.value.status, caught.value.param) == (400, "input")


def test_a_prompt_that_leaves_no_room_is_refused_with_numbers(golden: Any) -> None:
    small = OrpheusProcessor(golden.checkpoint, Limits(max_model_len=29))
    with pytest.raises(RequestError, match=r"29 tokens.*29") as caught:
        small.encode(speech(golden.inputs["prompts"][0]["text"]))
    assert caught.value.code == "context_length_exceeded"
    assert OrpheusProcessor(golden.checkpoint, Limits(max_model_len=30)).encode(
        speech(golden.inputs["prompts"][0]["text"])
    ).inputs["segments"][0]["limit"] == 1  # fmt: skip


def test_long_text_becomes_segments_and_parts_keep_their_order(processor: OrpheusProcessor) -> None:
    long = "This is a sentence of some length, and here it ends. " * 20
    encoded = processor.encode(speech("First.", long, "Last."))
    prompts = encoded.sampler_prompts["main"]
    assert len(prompts) == len(encoded.inputs["segments"]) > 5
    assert prompts[0] == processor.prompt_ids("First.", voice="tara")
    assert prompts[-1] == processor.prompt_ids("Last.", voice="tara")
    assert encoded.prompt_token_ids == [token for ids in prompts for token in ids]


# ---- parameters -----------------------------------------------------------------------------------------


def test_max_tokens_is_a_budget_only_when_given(processor: OrpheusProcessor) -> None:
    assert processor.encode(speech("Hi.")).fields == {}
    encoded = processor.encode(speech("Hi.", max_tokens=50))
    assert encoded.fields == {"max_tokens": 50}
    assert encoded.kv_tokens == {"lm.main": len(encoded.prompt_token_ids) + 50}


def test_sampling_defaults_are_the_published_ones(processor: OrpheusProcessor) -> None:
    sampling = processor.encode(speech("Hi.")).samplers["main"]
    assert (sampling.temperature, sampling.top_p, sampling.repetition_penalty, sampling.top_k) == (0.6, 0.8, 1.3, 0)


def test_client_wins_over_checkpoint_over_published(golden: Any) -> None:
    generation = {"temperature": 0.5, "top_p": 0.5, "top_k": 5, "eos_token_id": 3}
    config = golden.checkpoint.config
    changed = type(config)(
        **{name: getattr(config, name) for name in config.__dataclass_fields__} | {"generation": generation}
    )
    checkpoint = Checkpoint(model="m", folder=golden.checkpoint.folder, parts={}, config=changed)
    encoded = OrpheusProcessor(checkpoint, Limits(max_model_len=99)).encode(speech("Hi.", top_k=4))
    sampling = encoded.samplers["main"]
    assert (sampling.top_k, sampling.top_p, sampling.temperature, sampling.repetition_penalty) == (4, 0.5, 0.5, 1.3)


def test_temperature_zero_is_kept(processor: OrpheusProcessor) -> None:
    assert processor.encode(speech("Hi.", temperature=0.0)).samplers["main"].temperature == 0


@pytest.mark.parametrize("token", ["28990", "-1", "x"])
def test_logit_bias_outside_the_vocabulary_is_refused(processor: OrpheusProcessor, token: str) -> None:
    with pytest.raises(RequestError) as caught:
        processor.encode(speech("Hi.", logit_bias={token: 1.0}))
    assert caught.value.param == "logit_bias"


# ---- vocode ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int64, torch.int16, torch.int32])
def test_codes_are_taken_as_integers_of_any_width(processor: OrpheusProcessor, dtype: torch.dtype) -> None:
    (item,) = processor.encode(vocode(torch.arange(14, dtype=dtype))).inputs["segments"]
    assert torch.equal(item["codes"], torch.arange(14))


@pytest.mark.parametrize(
    "codes",
    [
        torch.zeros(0, dtype=torch.int64),
        torch.zeros(8, dtype=torch.int64),
        torch.full((7,), 4096),
        torch.full((7,), -1),
        torch.zeros(7),
        torch.zeros(1, 7, dtype=torch.int64),
        torch.zeros(7, dtype=torch.bool),
    ],
    ids=str,
)
def test_codes_that_are_no_frames_are_refused(processor: OrpheusProcessor, codes: torch.Tensor) -> None:
    with pytest.raises(RequestError) as caught:
        processor.encode(vocode(codes))
    assert (caught.value.status, caught.value.param) == (400, "codes")


# ---- emissions ------------------------------------------------------------------------------------------


def speak(
    processor: OrpheusProcessor,
    segments: list[list[np.ndarray]],
    *,
    outputs: tuple[str, ...] = ("audio",),
    speed: float = 1.0,
) -> list[list[Chunk]]:
    """Chunks per emission of segments that each speak in pieces."""
    parts = [TokensPart([1, 2])] * len(segments)
    request = speech(*parts, outputs=outputs, speed=speed)
    state = processor.start(request, processor.encode(request))
    chunks = []
    for index, pieces in enumerate(segments):
        for piece in pieces:
            chunks.append(list(processor.decode(state, Emission("audio", (index,), torch.from_numpy(piece)))))
        chunks.append(list(processor.decode(state, Emission("audio", (index,), None, final=True, reason="stop"))))
    return chunks


def joined(chunks: list[list[Chunk]]) -> np.ndarray:
    return np.concatenate(
        [np.zeros(0, np.float32), *(c.samples for cs in chunks for c in cs if isinstance(c, AudioChunk))]
    )


def loud(*sizes: int) -> list[np.ndarray]:
    return [np.ones(size, dtype=np.float32) for size in sizes]


def test_a_single_segment_is_not_touched_and_not_held_back(processor: OrpheusProcessor) -> None:
    chunks = speak(processor, [loud(4096, 2048)])
    assert [len(cs) for cs in chunks] == [2, 2, 0]
    assert np.array_equal(joined(chunks), np.ones(6144))


def test_segments_join_without_a_click_and_without_overlap(processor: OrpheusProcessor) -> None:
    audio = joined(speak(processor, [loud(4096, 2048), loud(2048), loud(2048, 2048)]))
    assert len(audio) == 6144 + 2048 + 4096
    assert np.abs(np.diff(audio)).max() < 0.05
    for join in (6144, 8192):
        assert abs(audio[join - 1]) < 0.01
        assert abs(audio[join]) < 0.01
    untouched = np.ones(len(audio), dtype=bool)
    for join in (6144, 8192):
        untouched[join - 120 : join + 120] = False
    assert (audio[untouched] == 1).all()


def test_a_segment_is_heard_at_once_but_for_its_last_milliseconds(processor: OrpheusProcessor) -> None:
    first, *_ = speak(processor, [loud(4096), loud(2048)])
    assert len(first[0].samples) == 4096 - processor.fade_samples  # type: ignore[union-attr]


def test_silent_segments_join_nothing(processor: OrpheusProcessor) -> None:
    audio = joined(speak(processor, [[], loud(2048), [], loud(2048), []]))
    assert len(audio) == 4096
    assert audio[0] == 1
    assert np.abs(np.diff(audio[:4000])).max() < 0.05
    assert len(joined(speak(processor, [[], []]))) == 0


def test_segments_shorter_than_a_fade_lose_no_sample(processor: OrpheusProcessor) -> None:
    assert len(joined(speak(processor, [loud(5, 3), loud(1), loud(7)]))) == 16


def hum(*sizes: int) -> list[np.ndarray]:
    """One tone, in pieces."""
    samples = (0.5 * np.cos(2 * np.pi * 220 * np.arange(sum(sizes)) / 24000)).astype(np.float32)
    return np.split(samples, np.cumsum(sizes)[:-1])


@pytest.mark.parametrize("speed", [0.25, 0.8, 2.0, 4.0])
def test_speed_changes_each_segments_length_and_joins_stay_silent(processor: OrpheusProcessor, speed: float) -> None:
    segments = [hum(4096, *[2048] * 9), hum(4096), [], hum(4096, 2048)]
    audio = joined(speak(processor, segments, speed=speed))
    lengths = [round(sum(map(len, pieces)) / speed) for pieces in segments if pieces]
    assert len(audio) == sum(lengths)
    steepest = np.abs(np.diff(np.concatenate(segments[0]))).max()
    assert np.abs(np.diff(audio)).max() < 1.5 * steepest
    for join in np.cumsum(lengths)[:-1]:
        assert abs(audio[join - 1]) < 0.01
        assert abs(audio[join]) < 0.01
    quiet = processor.fade_samples
    assert np.sqrt(np.mean(audio[quiet : lengths[0] - quiet] ** 2)) > 0.3


@pytest.mark.parametrize("speed", [0.5, 1.5])
def test_speed_does_the_same_to_pieces_of_any_size(processor: OrpheusProcessor, speed: float) -> None:
    whole = joined(speak(processor, [hum(10_000), hum(5000)], speed=speed))
    pieces = [np.split(hum(10_000)[0], [1, 700, 4000]), np.split(hum(5000)[0], [4999])]
    assert np.array_equal(joined(speak(processor, pieces, speed=speed)), whole)


def test_speed_one_changes_no_bit(processor: OrpheusProcessor) -> None:
    pieces = np.split(np.random.default_rng(0).standard_normal(8192).astype(np.float32), 4)
    chunks = speak(processor, [pieces], speed=1.0)
    assert joined(chunks).tobytes() == np.concatenate(pieces).tobytes()
    assert [len(cs) for cs in chunks] == [2, 2, 2, 2, 0]


def test_audio_is_also_a_tensor(processor: OrpheusProcessor) -> None:
    ((one, other), _) = speak(processor, [loud(2048)])
    assert isinstance(one, AudioChunk)
    assert one.sample_rate == 24000
    assert isinstance(other, TensorChunk)
    assert (other.name, other.tensor.tolist()) == ("audio", one.samples.tolist())


def test_speech_without_a_frame_is_empty_audio(processor: OrpheusProcessor) -> None:
    *nothing, (audio, tensor) = speak(processor, [[], []])
    assert nothing == [[]]
    assert isinstance(audio, AudioChunk)
    assert isinstance(tensor, TensorChunk)
    assert len(audio.samples) == len(tensor.tensor) == 0
    request = speech("a")
    state = processor.start(request, processor.encode(request))
    (codes,) = processor.decode(state, Emission("codes", (0,), None, final=True))
    assert isinstance(codes, TensorChunk)
    assert codes.tensor.shape == (0,)


def test_codes_are_given_as_vocabulary_ids_that_go_on_per_segment(golden: Any, processor: OrpheusProcessor) -> None:
    ids = golden.answers["p0"]["greedy_ids"][:21]
    base = golden.answers["special_ids"]["audio_base"]
    codes = torch.tensor([(token - base) % 4096 for token in ids])
    request = speech("a", "b", outputs=("tensors",))
    state = processor.start(request, processor.encode(request))
    found: list[int] = []
    for item in range(2):
        for start in range(0, 21, 7):
            for chunk in processor.decode(state, Emission("codes", (item,), codes[start : start + 7])):
                assert isinstance(chunk, TensorChunk)
                assert chunk.name == "codes"
                found += chunk.tensor.tolist()
        assert not list(processor.decode(state, Emission("codes", (item,), None, final=True)))
    assert found == ids * 2
