"""The codec against the golden outputs, and against the `snac` package on a fresh checkpoint of another size."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mstar.plugin.nodes import Context, StreamChunk, Task
from mstar.plugin.spec import Checkpoint
from mstar_plugin_orpheus.modeling.frames import LEVEL_SLOTS
from mstar_plugin_orpheus.nodes import Codec
from mstar_plugin_orpheus.plugin import CodecParams

QUIET = CodecParams(codec_noise=False)


def load(checkpoint: Checkpoint) -> Codec:
    codec = Codec(checkpoint.config)
    codec.load_weights(checkpoint, dtype=torch.bfloat16, device=torch.device("cpu"))
    return codec.eval()


@pytest.fixture(scope="module")
def codec(golden: Any) -> Codec:
    return load(golden.checkpoint)


def levels(codes: Tensor) -> list[Tensor]:
    frames = codes.view(1, -1, 7)
    return [frames[:, :, list(slots)].flatten(1) for slots in LEVEL_SLOTS]


@torch.inference_mode()
def vocode(codec: Codec, windows: list[tuple[Tensor, StreamChunk]], *, params: CodecParams = QUIET, padding: int = 0,
           keys: list[int] | None = None) -> list[Tensor | None]:  # fmt: skip
    """One batch through prepare, method and finish, as the runner does it."""
    keys = keys or [5] * len(windows)
    tasks = [
        Task("r", (), {"window": items}, chunks={"window": chunk}, params=params, draw_key=key)
        for (items, chunk), key in zip(windows, keys, strict=True)
    ]
    batch = torch.stack([items for items, _ in windows] + [windows[-1][0]] * padding)
    num_rows = len(windows) + padding
    ctx = Context(
        num_rows=num_rows,
        query_starts=torch.arange(num_rows + 1),
        last_tokens=torch.arange(num_rows),
        positions=torch.zeros(num_rows, dtype=torch.int64),
        rows=torch.ones(num_rows, dtype=torch.int64),
        iteration=torch.zeros(num_rows, dtype=torch.int64),
        draw_keys=torch.tensor(keys + [0] * padding),
        sample=lambda name, logits: logits.argmax(-1),
        plan={
            name: torch.cat([planned, planned[-1:].expand(padding)])
            for name, planned in codec.prepare_vocode(tasks).tensors.items()
        },
    )
    outputs = codec.vocode(ctx, batch)
    assert outputs["audio"].shape[0] == num_rows
    return codec.finish_vocode(tasks, {"audio": outputs["audio"][: len(windows)]})["audio"]


def windows_of(codes: Tensor) -> list[tuple[Tensor, StreamChunk]]:
    """What the stream's policy makes of codes."""
    from mstar.plugin.graph import SlidingWindow
    from mstar.worker.streams import ChunkCursor

    cursor, found = ChunkCursor(SlidingWindow(28, 7), {}), []
    while (span := cursor.next(len(codes), closed=True)) is not None:
        items = codes[span.start : span.end]
        found.append((items, StreamChunk(items, span.num_new, span.first, span.final, span.start)))
    return found


def stream(codec: Codec, codes: Tensor, **given: Any) -> list[Tensor]:
    parts = [part for window in windows_of(codes) for part in vocode(codec, [window], **given)]
    return [part for part in parts if part is not None]


def int16(audio: Tensor) -> np.ndarray:
    return (audio.numpy() * 32767).astype(np.int16).astype(np.int32)


# ---- parity ---------------------------------------------------------------------------------------------


def test_codes_split_into_the_original_levels(golden: Any) -> None:
    for index, level in enumerate(levels(golden.codes)):
        assert torch.equal(level[0], golden.tensors[f"snac.codes_level{index}"])


def test_latents_and_audio_without_noise_are_those_of_the_original(golden: Any, codec: Codec) -> None:
    with torch.inference_mode():
        latents = codec.decoder.latents(levels(golden.codes))[0]
        audio = codec.decoder(levels(golden.codes))[0]
    torch.testing.assert_close(latents, golden.tensors["snac.full.z_q"].view_as(latents), atol=1e-5, rtol=0)
    torch.testing.assert_close(audio, golden.tensors["snac.full.audio_zero_noise"], atol=1e-4, rtol=0)


def test_audio_with_given_noise_is_that_of_the_original(golden: Any, codec: Codec) -> None:
    noise = [golden.tensors[f"snac.noise.block{block}"][None] for block in range(4)]
    assert tuple(x.shape[1] // 4 for x in noise) == codec.decoder.block_steps
    with torch.inference_mode():
        audio = codec.decoder(levels(golden.codes[:28]), noise)[0]
    torch.testing.assert_close(audio, golden.tensors["snac.noise.window0_audio"], atol=1e-4, rtol=0)


def test_chunks_inside_are_those_of_the_original_streaming_decoder(golden: Any, codec: Codec) -> None:
    audio = torch.cat(stream(codec, golden.codes))
    assert len(audio) == 12 * 2048
    ours = int16(audio).reshape(12, 2048)[1:10]
    assert np.abs(ours - golden.tensors["snac.stream.chunks_int16"].numpy()).max() <= 4


def test_the_first_and_last_frames_come_from_the_first_and_last_window(golden: Any, codec: Codec) -> None:
    first, *_, last = stream(codec, golden.codes)
    windows = golden.tensors["snac.stream.window_audio_float_first3"]
    torch.testing.assert_close(first, windows[0, :4096], atol=1e-4, rtol=0)
    with torch.inference_mode():
        window = codec.decoder(levels(golden.codes[-28:]))[0]
    torch.testing.assert_close(last, window[4096:], atol=1e-4, rtol=0)


@pytest.mark.parametrize("depthwise", [True, False])
@pytest.mark.parametrize("noise", [True, False])
def test_a_fresh_codec_of_another_size_sounds_like_the_snac_package(
    golden: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, depthwise: bool, noise: bool
) -> None:
    import json

    snac = pytest.importorskip("snac")
    from mstar_plugin_orpheus import config, weights
    from mstar_plugin_orpheus.modeling.snac import SnacDecoder

    settings = {
        "sampling_rate": 16000, "encoder_dim": 2, "encoder_rates": [3, 5, 2], "latent_dim": None, "decoder_dim": 24,
        "decoder_rates": [5, 3, 2], "attn_window_size": None, "codebook_size": 60, "codebook_dim": 5,
        "vq_strides": [4, 2, 1], "noise": noise, "depthwise": depthwise,
    }  # fmt: skip
    torch.manual_seed(3)
    original = snac.SNAC(**settings).eval()
    for parameter in original.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    (tmp_path / "config.json").write_text(json.dumps(settings))
    torch.save(original.state_dict(), tmp_path / "pytorch_model.bin")
    ours = SnacDecoder(config._load_codec(tmp_path))
    weights.load_codec(ours, tmp_path, device=torch.device("cpu"))
    codes = torch.randint(0, 60, (2, 7 * 5))
    split = [codes.view(2, -1, 7)[:, :, list(slots)].flatten(1) for slots in LEVEL_SLOTS]
    draws = [torch.randn(2, 1, 5 * steps) for steps in ours.block_steps]
    given = iter(draws)
    monkeypatch.setattr(torch, "randn", lambda *_, **__: next(given).clone())
    with torch.inference_mode():
        expected = original.decode(split)[:, 0]
        audio = ours(split, [draw[:, 0] for draw in draws] if noise else None)
    assert audio.shape == (2, 5 * 120)
    torch.testing.assert_close(audio, expected, atol=1e-5, rtol=0)


def test_the_tiny_codec_is_in_the_layout_of_the_snac_package(tiny_checkpoint: Checkpoint) -> None:
    snac = pytest.importorskip("snac")
    original = snac.SNAC.from_pretrained(str(tiny_checkpoint.parts["snac_24khz"]))
    codec = load(tiny_checkpoint)
    codes = levels(torch.arange(70) * 50)
    for module in original.modules():
        if type(module).__name__ == "NoiseBlock":
            module.forward = lambda x: x
    with torch.inference_mode():
        torch.testing.assert_close(codec.decoder(codes), original.decode(codes)[:, 0], atol=1e-5, rtol=0)
        audio = codec.decoder(codes)
    assert 0.02 < audio.std() < 0.5
    assert audio.abs().max() < 0.999


# ---- windows and noise ----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_frames", range(1, 8))
def test_n_frames_give_n_times_2048_samples(golden: Any, codec: Codec, num_frames: int) -> None:
    parts = stream(codec, golden.codes[: 7 * num_frames])
    assert sum(map(len, parts)) == num_frames * 2048
    if num_frames <= 4:
        with torch.inference_mode():
            whole = codec.decoder(levels(golden.codes[: 7 * num_frames]))[0]
        torch.testing.assert_close(torch.cat(parts), whole, atol=1e-4, rtol=0)


def test_no_frames_are_no_sound(codec: Codec) -> None:
    ((items, chunk),) = windows_of(torch.zeros(0, dtype=torch.int64))
    assert chunk.final
    assert vocode(codec, [(items, chunk)]) == [None]


def test_windows_of_many_requests_batch(golden: Any, codec: Codec) -> None:
    windows = windows_of(golden.codes)[:8]
    keys = list(range(8))
    alone = [
        part for w, k in zip(windows, keys, strict=True) for part in vocode(codec, [w], params=CodecParams(), keys=[k])
    ]
    for padding in (0, 8):
        together = vocode(codec, windows, params=CodecParams(), keys=keys, padding=padding)
        for one, other in zip(alone, together, strict=True):
            assert np.abs(int16(one) - int16(other)).max() <= 2


def test_noise_is_seeded_and_can_be_switched_off(golden: Any, codec: Codec) -> None:
    codes = golden.codes[:28]
    quiet = torch.cat(stream(codec, codes))
    noisy = [torch.cat(stream(codec, codes, params=CodecParams(), keys=[key])) for key in (7, 7, 8)]
    assert torch.equal(noisy[0], noisy[1])
    assert (noisy[0] - noisy[2]).abs().max() > 1e-2
    assert (noisy[0] - quiet).abs().max() > 1e-2


def test_requests_with_and_without_noise_batch(golden: Any, codec: Codec) -> None:
    (window, *_) = windows_of(golden.codes)
    tasks_alone = [vocode(codec, [window], params=params)[0] for params in (CodecParams(), QUIET)]
    both = [
        Task("r", (), {}, chunks={"window": window[1]}, params=params, draw_key=5) for params in (CodecParams(), QUIET)
    ]
    gain = codec.prepare_vocode(both).tensors["noise_gain"]
    assert gain.tolist() == [1.0, 0.0]
    assert not torch.equal(tasks_alone[0], tasks_alone[1])


def test_windows_that_overlap_hear_the_same_noise(codec: Codec) -> None:
    def noise(first_frame: int) -> list[Tensor]:
        ctx = Context(
            num_rows=1, query_starts=torch.zeros(2), last_tokens=torch.zeros(1), positions=torch.zeros(1),
            rows=torch.zeros(1), iteration=torch.zeros(1), draw_keys=torch.tensor([99]), sample=lambda name, x: x,
            plan={"first_frame": torch.tensor([first_frame]), "noise_gain": torch.ones(1)},
        )  # fmt: skip
        return codec._noise(ctx, num_frames=4)

    for early, late, steps in zip(noise(3), noise(4), codec.decoder.block_steps, strict=True):
        assert torch.equal(early[:, steps:], late[:, :-steps])
        assert abs(early.mean()) < 6 / early.numel() ** 0.5
    blocks = [x[0, :128] for x in noise(0)]
    assert not any(torch.equal(blocks[i], blocks[j]) for i in range(4) for j in range(i))


def test_the_codec_stays_float32_whatever_the_model_is(codec: Codec) -> None:
    assert {p.dtype for p in codec.parameters()} == {torch.float32}


def test_a_checkpoint_that_lacks_or_adds_a_name_is_refused(golden: Any, tmp_path: Path) -> None:
    from mstar.errors import ConfigError
    from mstar_plugin_orpheus import weights
    from mstar_plugin_orpheus.modeling.snac import SnacDecoder

    source = torch.load(golden.checkpoint.parts["snac_24khz"] / "pytorch_model.bin", weights_only=True)
    changed = [
        {name: tensor for name, tensor in source.items() if name != "decoder.model.7.bias"},
        {**source, "decoder.model.9.bias": torch.zeros(1)},
    ]
    for tensors in changed:
        torch.save(tensors, tmp_path / "pytorch_model.bin")
        with pytest.raises(ConfigError):
            weights.load_codec(SnacDecoder(golden.checkpoint.config.codec), tmp_path, device=torch.device("cpu"))
