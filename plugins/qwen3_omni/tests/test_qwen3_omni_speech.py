"""Talker, code predictor and codec give what the authors' code gave, from the same inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from mstar.plugin.spec import Checkpoint
from mstar_plugin_qwen3_omni import config as configuration
from mstar_plugin_qwen3_omni.config import OmniConfig
from mstar_plugin_qwen3_omni.config.speech import SpeechConfig
from mstar_plugin_qwen3_omni.graph import TALKER_PROMPT
from mstar_plugin_qwen3_omni.modeling.code2wav import Code2Wav
from mstar_plugin_qwen3_omni.modeling.predictor import FrameCache, Predictor
from mstar_plugin_qwen3_omni.modeling.talker import Talker
from mstar_plugin_qwen3_omni.plugin import CodecParams
from mstar_plugin_qwen3_omni.processing.spoken import speaker_id, talker_prompt, windows
from mstar_plugin_qwen3_omni.weights import speech as weights

CPU = torch.device("cpu")
Parts = tuple[Talker, Predictor, Code2Wav]
RUNS = ("text", "text_other_speaker", "text_rp1", "text_long", "image_audio", "video_audio")


@pytest.fixture(scope="module")
def omni(golden: Any) -> OmniConfig:
    return configuration.load(golden.folder, {})


@pytest.fixture(scope="module")
def speech(omni: OmniConfig) -> SpeechConfig:
    assert omni.speech is not None
    return omni.speech


@pytest.fixture(scope="module")
def parts(golden: Any, omni: OmniConfig, speech: SpeechConfig) -> Parts:
    checkpoint = Checkpoint(model="golden", folder=golden.folder, config=omni)
    with torch.device("meta"):
        talker, predictor, codec = Talker(speech.talker), Predictor(speech.predictor), Code2Wav(speech.vocoder)
    weights.load_talker(talker, checkpoint, torch.float32, CPU)
    weights.load_predictor(predictor, checkpoint, torch.float32, CPU)
    weights.load_vocoder(codec, checkpoint, torch.float32, CPU)
    return talker, predictor, codec


class Growing:
    """Causal attention of one sequence over all that came before."""

    def __init__(self) -> None:
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layer in self.kept:
            k, v = (torch.cat(pair) for pair in zip(self.kept[layer], (k, v), strict=True))
        self.kept[layer] = k, v
        mask = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        groups = q.shape[1] // k.shape[1]
        heads = (x.transpose(0, 1) for x in (q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)))
        return functional.scaled_dot_product_attention(*heads, attn_mask=mask).transpose(0, 1)


class FrameByFrame:
    """The loop of frames, written down plainly; greedy."""

    def __init__(self, speech: SpeechConfig, talker: Talker, predictor: Predictor) -> None:
        self.speech, self.talker, self.predictor = speech, talker, predictor
        shape = speech.predictor
        self.pool = torch.zeros(1, shape.num_layers, 2, shape.num_groups, shape.num_kv_heads, shape.head_dim)

    def frame(self, hidden: Tensor, code: Tensor, first: Tensor) -> tuple[list[int], Tensor, Tensor]:
        """The frame's codes, the sum of what they stand for (H,), and the predictor's logits (groups - 1, vocab)."""
        rows, codes, total, logits = torch.tensor([0]), [int(code)], first, list[Tensor]()
        x, places = torch.stack((hidden, first), dim=1), torch.arange(2)[None]
        for number in range(self.speech.predictor.num_groups - 1):
            found = self.predictor(x, FrameCache(self.pool, rows, places))
            logits.append(self.predictor.logits(found, number=torch.tensor([number])))
            codes.append(int(logits[-1].argmax()))
            embedded = self.predictor.embed(logits[-1].argmax(-1), number=torch.tensor([number]))
            total, x, places = total + embedded, embedded[:, None], torch.tensor([[number + 2]])
        return codes, total[0], torch.cat(logits)

    def speak(
        self, prompt: dict[str, Tensor], taps: Tensor, words: list[int], *, steps: int, penalty: float
    ) -> tuple[list[list[int]], Tensor, Tensor]:
        """Frames, and what the talker read in its prompt (P, H) and made of each step (steps, H)."""
        tokens, growing = self.speech.talker.tokens, Growing()
        ids, sources, codes, places = (prompt[name] for name in TALKER_PROMPT)
        heard = self.talker.heard(taps[sources.clamp(min=0)]).where(sources[:, None] >= 0, self.talker.text(ids))
        read = heard + self.talker.codes(codes)
        self.talker(read, places, growing.attend)
        total, position = self.talker.codes(torch.tensor([tokens.bos]))[0], float(places[-1, 0])
        frames, hiddens, drawn = list[list[int]](), list[Tensor](), list[int]()
        for step in range(steps):
            text = [*words, tokens.text_eos][step] if step <= len(words) else tokens.text_pad
            position += 1
            x = total + self.talker.text(torch.tensor([text]))
            hidden = self.talker(x, torch.tensor([position]), growing.attend)
            hiddens.append(hidden[0])
            logits = self.talker.logits(hidden)[0]
            seen = torch.tensor(sorted(set(drawn)), dtype=torch.int64)
            logits[seen] = (logits[seen] * penalty).where(logits[seen] < 0, logits[seen] / penalty)
            drawn.append(int(logits.argmax()))
            if drawn[-1] == self.speech.talker.num_codes:
                break
            code = torch.tensor([drawn[-1]])
            frame, total, _ = self.frame(hidden, code, self.talker.codes(code))
            frames.append(frame)
        return frames, read, torch.stack(hiddens)


@pytest.mark.parametrize("run", RUNS)
@torch.inference_mode()
def test_frames_are_those_of_the_authors_code(
    golden: Any, omni: OmniConfig, speech: SpeechConfig, parts: Parts, run: str
) -> None:
    facts, source = golden.facts["full"][run], golden.facts["full"][run]["run"]
    tensors = golden.tensors
    ids, places = torch.tensor(golden.facts["runs"][source]["input_ids"]), tensors[f"thinker.{source}.position_ids"].T
    prompt = talker_prompt(omni, ids, places, speaker=speaker_id(omni, facts["speaker"]))
    talker, predictor, _ = parts
    taps = tensors[f"thinker.{source}.hidden_accept_layer"]
    expected = tensors[f"full.{run}.codes"].T.tolist()
    frames, read, hiddens = FrameByFrame(speech, talker, predictor).speak(
        prompt, taps, facts["thinker_ids"][:-1], steps=len(expected) + 1, penalty=facts["repetition_penalty"]
    )
    assert frames[: len(expected)] == expected
    if run != "text_long":
        assert torch.equal(prompt["talker_places"], tensors[f"full.{run}.talker_position_ids"].T[:-1])
        torch.testing.assert_close(read, tensors[f"full.{run}.talker_input_embeds"][:-1], atol=2e-4, rtol=0)
        torch.testing.assert_close(hiddens, tensors[f"full.{run}.talker_step_hidden"], atol=2e-4, rtol=0)
    else:
        assert len(frames) == len(expected)  # ended by the talker itself


@torch.inference_mode()
def test_the_predictor_draws_a_frame_from_the_talkers_hidden_state(
    golden: Any, speech: SpeechConfig, parts: Parts
) -> None:
    talker, predictor, _ = parts
    code = torch.tensor([golden.facts["cp"]["first_code"]])
    hidden = golden.inputs["cp_past_hidden"].view(1, -1)
    codes, total, logits = FrameByFrame(speech, talker, predictor).frame(hidden, code, talker.codes(code))
    assert codes[1:] == golden.tensors["cp.residual_codes"].tolist()
    torch.testing.assert_close(total, golden.tensors["cp.sum_embeds"], atol=2e-4, rtol=0)
    torch.testing.assert_close(logits, golden.tensors["cp.step_logits"], atol=2e-4, rtol=0)


@torch.inference_mode()
def test_the_codec_decodes_whole_and_in_the_authors_chunks(golden: Any, speech: SpeechConfig, parts: Parts) -> None:
    codec, facts, codes = parts[2], golden.facts["c2w"], golden.inputs["c2w_codes"]
    frames = codes.T[None]
    embedded = codec.embed(frames)
    torch.testing.assert_close(embedded[0], golden.tensors["c2w.embed"], atol=2e-4, rtol=0)
    torch.testing.assert_close(codec.transform(embedded)[0], golden.tensors["c2w.pre_transformer"], atol=2e-4, rtol=0)
    whole = codec(frames)[0]
    assert len(whole) == speech.vocoder.num_samples(frames.shape[1]) == facts["whole_samples"]
    assert speech.vocoder.lost_samples == facts["lost_samples_per_chunk"]
    torch.testing.assert_close(whole, golden.tensors["c2w.whole"], atol=5e-4, rtol=0)

    params = CodecParams(codec_chunk_frames=facts["chunk_size"], codec_left_context=facts["left_context_size"])
    cut = [
        codec(item["window"][None])[0, item["context"] * speech.vocoder.frame_samples :]
        for item in windows(speech, codes, params)
    ]
    torch.testing.assert_close(torch.cat(cut), golden.tensors["c2w.chunked"], atol=5e-4, rtol=0)
