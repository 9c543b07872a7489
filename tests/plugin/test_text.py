"""Incremental detokenising against the tokenizer's own decoding of the whole."""

from __future__ import annotations

import random

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from mstar.errors import PluginError
from mstar.plugin.text import Detokenizer, Vocabulary

TEXTS = (
    "plain words, and a  double space\n",
    "日本語のテキスト、한국어, עברית, ไทย",
    "👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 🇳🇵 letters, 👍🏽 skin",
    "é as one, é as two; 𝒳𝒴 beyond; ﷽ wide; \u200b nothing",
    " leads with a space",
    "�",
)


def byte_level() -> Tokenizer:
    """Trained on little, so that most characters are several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=290, initial_alphabet=alphabet, special_tokens=["<|end|>"], show_progress=False
    )
    tokenizer.train_from_iterator(["plain words 日本語 plain 日本", "👍👍🏽"] * 20, trainer)
    tokenizer.add_tokens([AddedToken("<tool é>", special=False)])
    return tokenizer


def byte_fallback(*, strip: bool) -> Tokenizer:
    words = ["<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "d", "l", "日", "▁a"]
    tokenizer = Tokenizer(
        models.BPE({word: place for place, word in enumerate(words)}, [("▁", "a")], byte_fallback=True, fuse_unk=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always" if strip else "never")
    steps: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


def metaspace() -> Tokenizer:
    words = ["▁", "a", "b", "▁a", "日"]
    tokenizer = Tokenizer(models.BPE({word: place for place, word in enumerate(words)}, [("▁", "a")]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return tokenizer


TOKENIZERS = {
    "byte level": byte_level(),
    "byte fallback": byte_fallback(strip=False),
    "byte fallback, stripped": byte_fallback(strip=True),
}


def pieces(tokenizer: Tokenizer, ids: list[int], *, at_once: int = 1) -> list[str]:
    detokenizer = Detokenizer(Vocabulary(tokenizer))
    fed = [detokenizer.feed(ids[start : start + at_once]) for start in range(0, len(ids), at_once)]
    return [*fed, detokenizer.flush()]


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_make_up_the_text_and_hold_whole_characters(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    for at_once in (1, 2, 5):
        found = pieces(tokenizer, ids, at_once=at_once)
        assert "".join(found) == tokenizer.decode(ids) and tokenizer.decode(ids).lstrip(" ") == text.lstrip(" ")
        assert found[-1] == ""
        assert "�" in text or not any("�" in piece for piece in found)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_texts_of_any_ids_are_what_their_bytes_say(name: str) -> None:
    tokenizer, rng = TOKENIZERS[name], random.Random(3)
    vocabulary = Vocabulary(tokenizer)
    for _ in range(50):
        ids = [rng.randrange(tokenizer.get_vocab_size()) for _ in range(30)]
        whole = b"".join(map(vocabulary.shown, ids)).decode(errors="replace")
        found = "".join(pieces(tokenizer, ids))
        assert found == (whole.removeprefix(" ") if vocabulary.leading_spaces else whole)
        if name == "byte level":  # the other decoders give up a whole run of bytes for one that is wrong
            assert found == tokenizer.decode(ids)


def test_a_character_comes_with_its_last_byte_and_a_wrong_byte_holds_nothing_up() -> None:
    tokenizer = TOKENIZERS["byte fallback"]
    ids = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "日".encode()]
    assert pieces(tokenizer, ids) == ["", "", "日", ""]
    assert pieces(tokenizer, [*ids[:2], tokenizer.token_to_id("a")]) == ["", "", "�a", ""]
    assert pieces(tokenizer, ids[:2]) == ["", "", "�"]
    assert pieces(tokenizer, [tokenizer.token_to_id("<0xFF>")] * 3) == ["�", "�", "�", ""]


def test_special_tokens_are_hidden_and_others_that_were_added_are_not() -> None:
    tokenizer = TOKENIZERS["byte level"]
    end, tool = tokenizer.token_to_id("<|end|>"), tokenizer.token_to_id("<tool é>")
    word = tokenizer.encode("a").ids
    ids = [end, *word, tool, end, 10**6]
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids) == "a<tool é>"
    vocabulary = Vocabulary(tokenizer, hidden=[tool])
    assert Detokenizer(vocabulary).feed([*word, tool]) == "a" and vocabulary.spelling(tool) == "<tool é>".encode()


def test_a_special_token_inside_a_character_does_not_break_it() -> None:
    tokenizer = TOKENIZERS["byte level"]
    first, *rest = tokenizer.encode("𝒳").ids
    assert rest and "".join(pieces(tokenizer, [first, tokenizer.token_to_id("<|end|>"), *rest])) == "𝒳"


@pytest.mark.parametrize("text", ["a b", "a  b", " a"])
def test_metaspace_begins_without_its_space(text: str) -> None:
    tokenizer = metaspace()
    ids = tokenizer.encode(text).ids
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


def test_a_decoder_over_several_tokens_is_refused() -> None:
    tokenizer = byte_level()
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(PluginError, match=r"WordPiece.*known are ByteLevel"):
        Vocabulary(tokenizer)
    with pytest.raises(PluginError, match="none"):
        Vocabulary(Tokenizer(models.BPE()))


def test_logprobs_name_tokens_in_text_and_bytes() -> None:
    vocabulary = Vocabulary(TOKENIZERS["byte fallback"])
    first = TOKENIZERS["byte fallback"].token_to_id("<0xE6>")
    found = vocabulary.logprob(first, -0.5, top=[(first, -0.5), (0, -2.0)])
    assert (found.token, found.bytes, found.logprob) == ("�", (0xE6,), -0.5)
    assert [entry.token for entry in found.top_logprobs] == ["�", "<s>"]
