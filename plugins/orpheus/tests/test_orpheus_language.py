"""The language model against the golden outputs, and against `transformers` on a fresh checkpoint of another size."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mstar.layers.attention import KVBatch, build_plan, choose_backend
from mstar.layers.sampling import SamplingState, process_logits
from mstar.layers.sampling import sample as draw
from mstar.plugin.nodes import Context, Task
from mstar.plugin.spec import Checkpoint
from mstar.types import SamplingParams
from mstar_plugin_orpheus import tiny, weights
from mstar_plugin_orpheus.nodes import LanguageModel
from mstar_plugin_orpheus.plugin import SpeechParams

PAGE = 16
GREEDY = SamplingParams(temperature=0)


class Engine:
    """Just enough of a worker to run prefill and decode over rows of a paged cache."""

    def __init__(self, model: LanguageModel, *, rows: int = 1, pages: int = 40) -> None:
        self.model = model
        layout = model.kv_layout
        assert layout is not None
        shape = (1 + rows * pages, layout.num_kv_heads, PAGE, layout.head_dim)
        self.keys = [torch.zeros(shape) for _ in range(layout.num_layers)]
        self.values = [torch.zeros(shape) for _ in range(layout.num_layers)]
        self.table = np.arange(1, 1 + rows * pages, dtype=np.int32).reshape(rows, pages)
        self.lengths = np.zeros(rows, dtype=np.int32)
        self.sampling = SamplingState.allocate(rows + 1, model.config.vocab_size, "cpu")
        self.logits = torch.zeros(0)

    def context(self, counts: list[int]) -> Context:
        rows, new = len(counts), np.array(counts, dtype=np.int32)
        plan = build_plan(
            query_lens=new, context_lens=self.lengths[:rows], page_table=self.table[:rows], page_size=PAGE, device="cpu"
        )
        positions = [np.arange(start, start + count) for start, count in zip(self.lengths, new, strict=False)]
        self.lengths[:rows] += new
        return Context(
            num_rows=rows,
            query_starts=plan.query_starts,
            last_tokens=plan.query_starts[1:].long() - 1,
            positions=torch.from_numpy(np.concatenate(positions)).long(),
            rows=torch.arange(1, rows + 1),
            iteration=torch.zeros(rows, dtype=torch.int64),
            draw_keys=torch.zeros(rows, dtype=torch.int64),
            sample=self.sample,
            kv=KVBatch(plan, self.keys, self.values, choose_backend("cpu")),
        )

    def sample(self, name: str, logits: Tensor) -> Tensor:
        assert name == "main"
        self.logits = logits
        return draw(logits, self.sampling, torch.arange(1, logits.shape[0] + 1))

    @torch.inference_mode()
    def generate(
        self, prompts: list[list[int]], *, steps: int, sampling: SamplingParams = GREEDY
    ) -> tuple[list[list[int]], list[Tensor]]:
        """Ids per prompt, and logits (B, V) per step."""
        for row, ids in enumerate(prompts):
            self.sampling.set_row(row + 1, sampling, 11 + row, ids)
        counts = [len(ids) - 1 for ids in prompts]
        self.model.prefill(self.context(counts), torch.tensor([t for ids in prompts for t in ids[:-1]]))
        last, drawn, logits = torch.tensor([ids[-1] for ids in prompts]), [], []
        for _ in range(steps):
            last = self.model.decode(self.context([1] * len(prompts)), last)["last"]
            drawn.append(last)
            logits.append(self.logits)
        return torch.stack(drawn, dim=1).tolist(), logits


def load(checkpoint: Checkpoint) -> LanguageModel:
    model = LanguageModel(checkpoint.config)
    model.load_weights(checkpoint, dtype=torch.float32, device=torch.device("cpu"))
    return model.eval()


@pytest.fixture(scope="module")
def model(golden: Any) -> LanguageModel:
    return load(golden.checkpoint)


# ---- parity ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["p0", "p1"])
def test_greedy_ids_and_logits_are_those_of_the_original(golden: Any, model: LanguageModel, case: str) -> None:
    prompt = golden.answers["prompts"][int(case[1])]["input_ids"]
    (ids,), logits = Engine(model).generate([prompt], steps=84)
    assert ids == golden.answers[case]["greedy_ids"]
    prefill = golden.tensors[f"lm.{case}.prefill_last_logits_every8"]
    torch.testing.assert_close(logits[0][0, ::8], prefill, atol=1e-4, rtol=0)
    decoded = golden.tensors[f"lm.{case}.decode_logits_steps_1_7_20_every32"]
    torch.testing.assert_close(torch.stack([logits[step][0, ::32] for step in (1, 7, 20)]), decoded, atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", ["p0", "p1"])
def test_penalised_ids_are_those_of_the_original(golden: Any, model: LanguageModel, case: str) -> None:
    prompt = golden.answers["prompts"][int(case[1])]["input_ids"]
    sampling = SamplingParams(temperature=0, repetition_penalty=1.3)
    (ids,), _ = Engine(model).generate([prompt], steps=84, sampling=sampling)
    assert ids == golden.answers[case]["rep_penalty_1_3_greedy_ids"]


@pytest.mark.parametrize("case", ["p0", "p1"])
def test_the_default_sampler_keeps_what_the_original_keeps(golden: Any, model: LanguageModel, case: str) -> None:
    prompt = golden.answers["prompts"][int(case[1])]["input_ids"]
    engine = Engine(model)
    (ids,), logits = engine.generate([prompt], steps=21)
    engine.sampling.set_row(
        1, SamplingParams(temperature=0.6, top_p=0.8, repetition_penalty=1.3), 0, [*prompt, *ids[:20]]
    )
    probabilities = process_logits(logits[20], engine.sampling, torch.tensor([1])).softmax(-1)[0]
    answer = golden.answers[case]["sampler_step20_T0.6_p0.8_rp1.3"]
    assert int((probabilities > 0).sum()) == answer["n_kept"]
    likeliest = probabilities.topk(20)
    assert likeliest.indices.tolist() == answer["ids"]
    torch.testing.assert_close(likeliest.values, torch.tensor(answer["probs"]), atol=1e-6, rtol=1e-3)


@torch.inference_mode()
def test_hidden_states_are_those_of_the_original(golden: Any, model: LanguageModel) -> None:
    for case in ("p0", "p1"):
        prompt = golden.answers["prompts"][int(case[1])]["input_ids"]
        context = Engine(model).context([len(prompt)])
        hidden = model.decoder(model.decoder.embed(torch.tensor(prompt)), context.positions, context.kv)
        torch.testing.assert_close(hidden, golden.tensors[f"lm.{case}.final_hidden"], atol=1e-4, rtol=0)


def test_requests_in_one_batch_draw_what_they_draw_alone(golden: Any, model: LanguageModel) -> None:
    prompts = [answer["input_ids"] for answer in golden.answers["prompts"]]
    together, _ = Engine(model, rows=4).generate(prompts, steps=30)
    assert together == [Engine(model).generate([prompt], steps=30)[0][0] for prompt in prompts]


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_fresh_model_of_another_size_agrees_with_transformers(golden: Any, tmp_path: Path, is_tied: bool) -> None:
    import dataclasses

    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(4)
    shape = LlamaConfig(
        vocab_size=30000, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=3, head_dim=12, rms_norm_eps=1e-6, max_position_embeddings=4096,
        tie_word_embeddings=is_tied,
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "high_freq_factor": 4.0,
            "low_freq_factor": 1.0, "original_max_position_embeddings": 64,
        },
    )  # fmt: skip
    original = LlamaForCausalLM(shape).eval()
    for name, parameter in original.named_parameters():
        parameter.data = torch.randn_like(parameter) * (0.3 if parameter.dim() > 1 else 0.1) + ("norm" in name)
    original.save_pretrained(tmp_path, max_shard_size="3MB")
    import json

    config = dataclasses.replace(golden.checkpoint.config, language=json.loads((tmp_path / "config.json").read_text()))
    model = load(Checkpoint(model="m", folder=tmp_path, config=config))
    prompt = torch.randint(0, 30000, (1, 100))
    with torch.inference_mode():
        expected = original.generate(
            prompt, max_new_tokens=40, do_sample=False, repetition_penalty=1.3, eos_token_id=29999, pad_token_id=0,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
    sampling = SamplingParams(temperature=0, repetition_penalty=1.3)
    (ids,), logits = Engine(model).generate([prompt[0].tolist()], steps=40, sampling=sampling)
    assert ids == expected.sequences[0, 100:].tolist()
    torch.testing.assert_close(torch.cat(logits), torch.cat(expected.logits), atol=1e-3, rtol=1e-4)


# ---- what ends speech, and what becomes frames ----------------------------------------------------------


def finish(model: LanguageModel, task: Task, token: int) -> list[int] | None:
    (codes,) = model.finish_decode([task], {"last": torch.tensor([token])})["codes"]
    return None if codes is None else codes.tolist()


def new_task(model: LanguageModel, **params: Any) -> Task:
    assert model.host_state is not None
    return Task("r", (), {}, params=SpeechParams(**params), state=model.host_state())


def test_seven_tokens_give_one_frame_of_codes(golden: Any, model: LanguageModel) -> None:
    ids = golden.answers["p0"]["greedy_ids"][:14]
    task = new_task(model)
    found = [finish(model, task, token) for token in ids]
    base = golden.answers["special_ids"]["audio_base"]
    codes = [token - base - 4096 * (index % 7) for index, token in enumerate(ids)]
    assert found == [None] * 6 + [codes[:7]] + [None] * 6 + [codes[7:]]
    assert task.counts == {"completion_tokens": 14}


def test_the_stop_token_ends_speech_and_an_unfinished_frame_is_counted(golden: Any, model: LanguageModel) -> None:
    task, stop = new_task(model), golden.answers["special_ids"]["end_of_speech"]
    for token in golden.answers["p0"]["greedy_ids"][:9]:
        finish(model, task, token)
    assert task.stop_reason is None
    assert finish(model, task, stop) is None
    assert task.stop_reason == "stop"
    assert task.counts == {"completion_tokens": 10, "skipped_codes": 2}


def test_ignoring_the_stop_token_skips_it(golden: Any, model: LanguageModel) -> None:
    task, stop = new_task(model, ignore_eos=True), golden.answers["special_ids"]["end_of_speech"]
    assert finish(model, task, stop) is None
    assert task.stop_reason is None
    assert task.counts == {"completion_tokens": 1, "skipped_codes": 1}


def test_the_golden_dirty_stream_loses_only_the_frames_with_bad_codes(golden: Any, model: LanguageModel) -> None:
    dirty = golden.answers["dirty_stream"]["custom_token_numbers"]
    first = golden.answers["special_ids"]["custom_token_0"]
    task = new_task(model, ignore_eos=True)  # the stream holds a stop token, too
    frames = [codes for number in dirty if (codes := finish(model, task, first + number)) is not None]
    slots = [(number - 10) // 4096 for number in dirty]
    whole = [i for i in range(len(dirty)) if slots[i : i + 7] == list(range(7))]
    assert len(frames) == len(whole) > 0
    assert task.counts.get("skipped_codes", 0) == len(dirty) - 7 * len(whole)


# ---- the tiny checkpoint --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_model(tiny_checkpoint: Checkpoint) -> LanguageModel:
    return load(tiny_checkpoint)


@pytest.mark.parametrize(
    "sampling",
    [GREEDY, SamplingParams(temperature=0.6, top_p=0.8, repetition_penalty=1.3), SamplingParams(temperature=1.0)],
    ids=["greedy", "default", "plain"],
)
def test_the_tiny_checkpoint_speaks_whole_frames_and_ends(tiny_model: LanguageModel, sampling: SamplingParams) -> None:
    tokens = tiny_model.config.tokens
    text = list(range(60, 68))
    prompt = [
        tokens.start_of_human, tokens.begin_of_text, *text, tokens.end_of_turn, tokens.end_of_human, tokens.start_of_ai,
        tokens.start_of_speech,
    ]  # fmt: skip
    (ids,), _ = Engine(tiny_model).generate([prompt], steps=130, sampling=sampling)
    assert tokens.end_of_speech in ids
    spoken = ids[: ids.index(tokens.end_of_speech)]
    assert 40 <= len(spoken) <= 120
    assert len(spoken) % 7 == 0
    assert [(token - tokens.audio_base) // 4096 for token in spoken] == [i % 7 for i in range(len(spoken))]


def test_the_tiny_checkpoint_is_the_same_every_time(tiny_folder: Path, tmp_path: Path) -> None:
    again = tiny.make(tmp_path)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        assert (again / name).read_bytes() == (tiny_folder / name).read_bytes()


def test_a_language_model_that_lacks_a_name_is_refused(golden: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    from mstar.errors import ConfigError

    tensors = load_file(golden.checkpoint.folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="gate_up"):
        weights.load_language_model(
            LanguageModel(golden.checkpoint.config).decoder, tmp_path, dtype=torch.float32, device=torch.device("cpu")
        )
