"""Speech through the engine, against what the model's authors' code gave; and what it does to a request's counters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from asking import Answer, Asked, ask_for, tensor, token_ids

from mstar.errors import RequestError

RUNS = ("text", "text_other_speaker", "text_rp1", "text_long", "image_audio", "video_audio")
GREEDY = {"temperature": 0, "repetition_penalty": 1, "talker_temperature": 0}
SPOKEN = ["text", "audio", "tensors"]


def params_of(golden: Any, run: str, **more: Any) -> dict[str, Any]:
    """As the authors' code was asked: it does not speak the token at which the thinker is cut."""
    facts, asked = golden.facts["full"][run], golden.asked
    return {
        **GREEDY,
        "speaker": facts["speaker"],
        "talker_repetition_penalty": facts["repetition_penalty"],
        "max_tokens": asked["thinker_max_new_tokens"],
        "talker_max_tokens": 90 if run == "text_long" else facts["n_frames"] + 1,
        "use_audio_in_video": facts["run"] == "video_audio",
        "speak_last_token": False,
        **more,
    }


def wire(golden: Any, run: str, **more: Any) -> Any:
    messages = golden.messages(golden.facts["full"][run]["run"])
    return ask_for(messages=messages, outputs=SPOKEN, params=params_of(golden, run, **more))


def speak(model: Asked, golden: Any, run: str, **more: Any) -> Answer:
    return model.ask_all(wire(golden, run, **more))[0]


def check(found: Answer, golden: Any, run: str) -> None:
    facts = golden.facts["full"][run]
    assert found.ids == [facts["thinker_ids"]]
    assert torch.equal(found.tensors["codes"], golden.tensors[f"full.{run}.codes"])
    assert len(found.tensors["audio"]) == facts["wav_samples"]


@pytest.mark.parametrize("run", RUNS)
def test_codes_are_the_authors(model: Asked, golden: Any, run: str) -> None:
    found = speak(model, golden, run)
    check(found, golden, run)
    counters, frames = found.result.counters, golden.facts["full"][run]["n_frames"]
    assert counters["talker.prefill"] == 1 and counters["code2wav.decode"] >= 1
    turns = frames + (run == "text_long")  # the end is drawn in a turn of its own
    assert counters["talker.step"] == counters["code_predictor.prefill"] == counters["code_predictor.sum"] == turns
    assert counters["code_predictor.step"] == 14 * turns


def test_the_sound_is_the_authors(model: Asked, golden: Any) -> None:
    found = speak(model, golden, "text").tensors["audio"]
    torch.testing.assert_close(found, golden.tensors["full.text.wav"], atol=5e-4, rtol=0)


def test_all_runs_together_are_what_they_are_alone(model: Asked, golden: Any) -> None:
    runs = RUNS + RUNS[:2]
    for run, found in zip(runs, model.ask_all(*(wire(golden, run) for run in runs), apart_s=0.02), strict=True):
        check(found, golden, run)


def test_an_answer_cut_by_its_limit_is_spoken_whole(model: Asked, golden: Any) -> None:
    """What the authors' code says of one token more, whose last it leaves out."""
    whole = speak(model, golden, "text", speak_last_token=True)
    longer = speak(model, golden, "text", max_tokens=golden.asked["thinker_max_new_tokens"] + 1)
    assert torch.equal(whole.tensors["codes"], longer.tensors["codes"])
    assert not torch.equal(whole.tensors["codes"], golden.tensors["full.text.codes"])


def test_one_word_is_spoken(model: Asked, golden: Any) -> None:
    found = speak(model, golden, "text", max_tokens=1, speak_last_token=True, talker_max_tokens=4)
    assert found.tensors["codes"].shape == (16, 3) and len(found.tensors["audio"]) == 3 * 1920 - 555


def test_nothing_is_spoken_where_nothing_is_said(model: Asked, golden: Any) -> None:
    found = speak(model, golden, "text", max_tokens=1)
    assert found.tensors["codes"].shape == (16, 0) and len(found.tensors["audio"]) == 0
    assert found.result.finish_reason == "length"


def test_frames_are_one_less_than_the_talkers_tokens(model: Asked, golden: Any) -> None:
    for limit in (1, 2, 6):
        found = speak(model, golden, "text", talker_max_tokens=limit)
        assert torch.equal(found.tensors["codes"], golden.tensors["full.text.codes"][:, : limit - 1])
        assert len(found.tensors["audio"]) == max(0, (limit - 1) * 1920 - 555)


@pytest.mark.parametrize("cap", [1, 3, 10])
def test_smaller_chunks_join_without_a_hole(model: Asked, golden: Any, cap: int) -> None:
    found = speak(model, golden, "text", codec_chunk_frames=cap)
    torch.testing.assert_close(found.tensors["audio"], golden.tensors["full.text.wav"], atol=5e-4, rtol=0)


def test_less_context_sounds_otherwise_but_leaves_no_hole(model: Asked, golden: Any) -> None:
    found = speak(model, golden, "text", codec_chunk_frames=3, codec_left_context=1).tensors["audio"]
    expected = golden.tensors["full.text.wav"]
    assert len(found) == len(expected) and torch.allclose(
        found[: 3 * 1920 - 555], expected[: 3 * 1920 - 555], atol=5e-4
    )
    assert not torch.allclose(found, expected, atol=5e-4)
    with pytest.raises(RequestError, match="codec_left_context"):
        speak(model, golden, "text", codec_left_context=0)


def test_codes_alone_need_no_codec(model: Asked, golden: Any) -> None:
    wires = wire(golden, "text")
    wires.outputs = ["text", "tensor:codes"]
    counters = model.ask_all(wires)[0].result.counters
    assert "talker.step" in counters and "code2wav.decode" not in counters


def test_an_unknown_speaker_is_refused_with_the_known_ones(model: Asked, golden: Any) -> None:
    with pytest.raises(RequestError, match="ethan, aiden, chelsie"):
        speak(model, golden, "text", speaker="nobody")


def test_speech_is_scored_as_text_alone_is(model: Asked, golden: Any) -> None:
    found = speak(model, golden, "image_audio", logprobs=3)
    check(found, golden, "image_audio")
    params = GREEDY | {"max_tokens": golden.asked["thinker_max_new_tokens"], "logprobs": 3}
    alone = model.ask(messages=golden.messages("image_audio"), params=params)
    scores = [[token for chunk in one.chunks for token in getattr(chunk, "logprobs", ())] for one in (found, alone)]
    assert scores[0] == scores[1] and len(scores[0]) == len(found.ids[0])
    assert all(len(token.top_logprobs) == 3 for token in scores[0])


@pytest.mark.parametrize("behind", [[5], None])
def test_answers_that_are_begun_are_not_spoken(model: Asked, golden: Any, behind: list[int] | None) -> None:
    """Nor users' turns, though there are earlier ones of the assistant's."""
    ids, turns = golden.facts["runs"]["text"]["input_ids"], golden.config.turns
    begun = [*ids, *(behind or [5, turns.end, 198, turns.start, turns.user, 198, 5])]
    with pytest.raises(RequestError, match="not begun can be spoken") as caught:
        model.ask(token_ids(begun), outputs=["audio"], params={"max_tokens": 1})
    assert caught.value.param == "inputs"
    assert model.ask(token_ids(begun), params={"max_tokens": 1}).ids


def test_vocode_is_the_authors_chunked_decode(model: Asked, golden: Any) -> None:
    codes, facts = golden.inputs["c2w_codes"], golden.facts["c2w"]
    whole = model.ask(tensor("codes", codes), task="vocode", outputs=["tensors"])
    torch.testing.assert_close(whole.tensors["audio"], golden.tensors["c2w.whole"], atol=5e-4, rtol=0)
    params = {"codec_chunk_frames": facts["chunk_size"], "codec_left_context": facts["left_context_size"]}
    cut = model.ask(tensor("codes", codes), task="vocode", outputs=["tensors"], params=params)
    torch.testing.assert_close(cut.tensors["audio"], golden.tensors["c2w.chunked"], atol=5e-4, rtol=0)
    assert cut.result.counters == {"code2wav.decode": 3}


@pytest.mark.parametrize(
    ("codes", "wrong"),
    [
        (torch.zeros(15, 3, dtype=torch.int64), "16, frames"),
        (torch.zeros(16, 0, dtype=torch.int64), "no frames"),
        (torch.full((16, 2), 64), "0..63"),
        (torch.zeros(16, 2), "integers"),
    ],
)
def test_codes_that_are_none_are_refused(model: Asked, codes: torch.Tensor, wrong: str) -> None:
    with pytest.raises(RequestError, match=wrong):
        model.ask(tensor("codes", codes), task="vocode")
