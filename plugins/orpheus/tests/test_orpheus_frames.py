import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstar.plugin.graph import SlidingWindow
from mstar_plugin_orpheus.modeling.frames import FRAME_CODES, WINDOW_FRAMES, FrameAssembler, new_frames, token_ids

BASE, SIZE = 316, 4096
STOP = 308


def frame_tokens(frame: list[int]) -> list[int]:
    return token_ids(frame, first=0, audio_base=BASE, codebook_size=SIZE)


def assemble(tokens: list[int], *, sizes: list[int] | None = None) -> tuple[list[int], int]:
    assembler = FrameAssembler(BASE, SIZE)
    codes: list[int] = []
    num_dropped, at = 0, 0
    for size in sizes or [len(tokens)]:
        got, dropped = assembler.push(tokens[at : at + size])
        codes, num_dropped, at = codes + got, num_dropped + dropped, at + size
    return codes, num_dropped + assembler.drop()


def some_frames(count: int, *, seed: int = 0) -> list[list[int]]:
    generator = random.Random(seed)
    return [[generator.randrange(SIZE) for _ in range(FRAME_CODES)] for _ in range(count)]


@pytest.mark.parametrize("slot", range(FRAME_CODES))
@pytest.mark.parametrize("code", [0, 4095])
def test_codes_0_and_4095_are_codes_in_every_slot(slot: int, code: int) -> None:
    frames = some_frames(3)
    frames[1][slot] = code
    codes, num_dropped = assemble([token for frame in frames for token in frame_tokens(frame)])
    assert codes == [code for frame in frames for code in frame]
    assert num_dropped == 0


BAD = {
    "a control token": BASE - 1,
    "a text token": 5,
    "an id above the last slot": BASE + FRAME_CODES * SIZE,
    "code 4096 of the last slot": BASE + 6 * SIZE + 4096,
}


@pytest.mark.parametrize("slot", range(FRAME_CODES))
@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
@pytest.mark.parametrize("how", ["replaces", "is inserted", "comes twice"])
def test_a_bad_token_costs_at_most_its_frame_and_is_counted(slot: int, bad: int, how: str) -> None:
    frames = some_frames(5)
    tokens = [frame_tokens(frame) for frame in frames]
    kept = slice(slot + 1, None) if how == "replaces" else slice(slot, None)
    tokens[2] = [*tokens[2][:slot], *([bad, bad] if how == "comes twice" else [bad]), *tokens[2][kept]]
    codes, num_dropped = assemble([token for frame in tokens for token in frame])
    survivors = frames if how != "replaces" and slot == 0 else frames[:2] + frames[3:]
    assert codes == [code for frame in survivors for code in frame]
    assert num_dropped == sum(map(len, tokens)) - len(codes) > 0


@pytest.mark.parametrize("slot", range(FRAME_CODES))
@pytest.mark.parametrize("wrong_slot", range(FRAME_CODES))
def test_a_code_in_the_wrong_slot_costs_at_most_its_frame(slot: int, wrong_slot: int) -> None:
    frames = some_frames(5)
    tokens = [frame_tokens(frame) for frame in frames]
    tokens[2][slot] = BASE + wrong_slot * SIZE + frames[2][slot]
    codes, num_dropped = assemble([token for frame in tokens for token in frame])
    survivors = frames if wrong_slot == slot else frames[:2] + frames[3:]
    assert codes == [code for frame in survivors for code in frame]
    assert num_dropped == 35 - len(codes)


@pytest.mark.parametrize("slot", range(FRAME_CODES))
def test_a_lost_token_costs_at_most_its_frame(slot: int) -> None:
    frames = some_frames(4)
    tokens = [frame_tokens(frame) for frame in frames]
    del tokens[1][slot]
    codes, num_dropped = assemble([token for frame in tokens for token in frame])
    assert codes == [code for index, frame in enumerate(frames) for code in frame if index != 1]
    assert num_dropped == 6


@given(st.lists(st.integers(1, 30), max_size=60), st.integers(0, 2**32))
def test_frames_do_not_depend_on_how_many_tokens_come_at_a_time(sizes: list[int], seed: int) -> None:
    generator = random.Random(seed)
    tokens = [token for frame in some_frames(20, seed=seed) for token in frame_tokens(frame)]
    for _ in range(5):
        tokens[generator.randrange(len(tokens))] = generator.randrange(BASE + 8 * SIZE)
    sizes = [*sizes, len(tokens)]
    assert assemble(tokens, sizes=sizes) == assemble(tokens)


def test_an_unfinished_frame_is_no_frame() -> None:
    codes, num_dropped = assemble(frame_tokens([1, 2, 3, 4, 5, 6, 7]) + frame_tokens([1, 2, 3]))
    assert codes == [1, 2, 3, 4, 5, 6, 7]
    assert num_dropped == 3


def test_the_token_ids_of_a_part_of_a_stream_continue_its_slots() -> None:
    codes = [code for frame in some_frames(2) for code in frame]
    whole = token_ids(codes, first=0, audio_base=BASE, codebook_size=SIZE)
    parts = [token_ids(codes[i : i + 5], first=i, audio_base=BASE, codebook_size=SIZE) for i in range(0, 14, 5)]
    assert [token for part in parts for token in part] == whole


@pytest.mark.parametrize("num_frames", range(1, 12))
def test_every_frame_of_a_stream_is_heard_once_and_in_order(num_frames: int) -> None:
    heard = [frame for _, _, frames in windows(num_frames) for frame in frames]
    assert heard == list(range(num_frames))


@pytest.mark.parametrize("num_frames", range(4, 12))
def test_a_window_inside_gives_its_second_frame_as_the_original_decoder_does(num_frames: int) -> None:
    inside = [(start, frames) for start, kind, frames in windows(num_frames) if kind == "inside"]
    assert inside == [(start, [start + 1]) for start in range(1, num_frames - 3)]


@pytest.mark.parametrize("num_new", range(3))
def test_the_final_window_gives_what_is_left_whatever_was_unseen(num_new: int) -> None:
    start, end = new_frames(num_frames=4, num_new_frames=num_new, first=False, final=True)
    assert (start, end) == (2 - num_new, 4)


def windows(num_frames: int) -> list[tuple[int, str, list[int]]]:
    """(first frame, kind, frames heard) of the windows that the engine's policy cuts a stream into."""
    from mstar.worker.streams import ChunkCursor

    policy = SlidingWindow(WINDOW_FRAMES * FRAME_CODES, FRAME_CODES)
    cursor = ChunkCursor(policy, {})
    found = []
    for count in range(num_frames + 1):
        while (span := cursor.next(count * FRAME_CODES, closed=count == num_frames)) is not None:
            at = span.start // FRAME_CODES
            start, end = new_frames(
                num_frames=(span.end - span.start) // FRAME_CODES,
                num_new_frames=span.num_new // FRAME_CODES,
                first=span.first,
                final=span.final,
            )
            kind = "final" if span.final else "first" if span.first else "inside"
            found.append((at, kind, list(range(at + start, at + end))))
    return found
