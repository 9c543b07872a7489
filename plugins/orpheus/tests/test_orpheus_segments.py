import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstar_plugin_orpheus.processing.segments import MAX_CHARACTERS, segment, sentences


def visible(text: str) -> str:
    return re.sub(r"\s+", "", text)


LONG = (
    "Dr. Smith moved to the U.S. in 1994, e.g. to study at M.I.T. under Prof. Jones. “It was $3.14,” he said. "
    "“Really?” she asked. "
    "Mr. and Mrs. Brown vs. the State of N.Y. began at 5 p.m. on Jan. 5. It lasted... well, long!\n\n"
    "His list:\n1. Apples, pears and (see Fig. 3) plums.\n2. No. 7 screws.\n- a dash; and more\n\n"
    "She said no. Then he sat. “Why?!” cried J. R. R. Tolkien Jr. from St. Ives. ‘Nobody knows.’ It's version 2.0.1 "
    "of example.com, isn't it? Yes… It is <laugh> indeed. Et cetera, etc. The end.\n"
) * 4


def test_short_text_stays_whole_as_it_is() -> None:
    text = "One.  Two!\nThree? " + "x" * 200
    assert segment(text) == [text]


def test_text_up_to_the_limit_is_one_segment() -> None:
    sentence = "a. " * 100
    assert segment(sentence) == [sentence.strip()]
    assert len(segment(sentence + "b.")) == 2


@pytest.mark.parametrize("text", ["", "  ", "\n\t"])
def test_blank_text_has_no_segments(text: str) -> None:
    assert segment(text) == []


def test_long_text_is_covered_in_order_and_cut_at_sentence_ends() -> None:
    parts = segment(LONG)
    assert visible("".join(parts)) == visible(LONG)
    assert all(0 < len(part) <= MAX_CHARACTERS for part in parts)
    assert all(re.search(r"[.!?…:][”’]?$|more$", part) for part in parts)
    assert len(parts) < 2.2 * len(LONG) / MAX_CHARACTERS


NOT_AN_END = [
    "in the U.S. Army",
    "at 5 p.m. John came",
    "e.g. This",
    "i.e. That",
    "Dr. No",
    "Mrs. Brown",
    "see Fig. 3",
    "No. 7 screws",
    "on Jan. 5",
    "pp. 12",
    "it is 3.14 exactly",
    "J. R. R. Tolkien",
    "wait... what",
    "etc. and so on",
    "vs. Them",
    "version 2.0.1 of",
    "“Really?” she asked",
    "\n1. Apples",
    "St. Ives",
    "“Stop!” he cried",
]


@pytest.mark.parametrize("text", NOT_AN_END)
def test_no_sentence_ends_inside(text: str) -> None:
    assert len(sentences(f"So {text}.")) == 1


IS_AN_END = [
    "He left. Then",
    "She said no. Then",
    "Yes! No",
    "Why? Because",
    "“Really?” “Yes",
    "(So it is.) Then",
    "the end… Then",
    "Wait... What",
    "it was 1994. In",
    "etc. The",
    "He said ‘so.’ Then",
    "Then he sat. ¿Qué",
    "OK?! Then",
    "是的。他",
    "真的！他",
    "यह है। वह",
]


@pytest.mark.parametrize("text", IS_AN_END)
def test_a_sentence_ends_inside(text: str) -> None:
    assert len(sentences(text)) == 2


def test_paragraphs_are_cut_before_sentences() -> None:
    first, second = "One sentence here. " * 10, "Another one there. " * 10
    assert segment(f"{first}\n\n{second}") == [first.strip(), second.strip()]


def test_a_long_sentence_is_cut_at_clauses() -> None:
    clause = "and then he walked on along the river and the hills for a while, "
    parts = segment(clause * 12)
    assert all(part.endswith(",") for part in parts)
    assert visible("".join(parts)) == visible(clause * 12)


def test_a_long_clause_is_cut_between_words() -> None:
    text = "word " * 200
    assert all(set(part.split()) == {"word"} for part in segment(text))


def test_a_long_word_is_cut_anywhere_but_not_before_a_mark() -> None:
    text = "क्षि" * 200
    parts = segment(text)
    assert "".join(parts) == text
    assert all(part[0] in "क" or part[0] == "ष" for part in parts)
    assert all(len(part) <= MAX_CHARACTERS for part in parts)


def test_decimals_and_web_names_are_never_cut() -> None:
    text = ("The price of example.com rose by 3.14 percent, or 1,000.50 dollars in all; that is much. " * 10).strip()
    words = {word for part in segment(text) for word in part.split()}
    assert {"example.com", "3.14", "1,000.50"} <= words


@given(
    st.text(alphabet=st.sampled_from("aB1.!?,; \n\t”’“()-—…。é\u0301"), max_size=400),
    st.integers(5, 60),
)
def test_no_text_is_lost_and_no_segment_too_long(text: str, limit: int) -> None:
    parts = segment(text, max_characters=limit)
    assert visible("".join(parts)) == visible(text)
    assert all(part == part.strip() and 0 < len(part) <= limit for part in parts)
    assert visible("".join(sentences(text))) == visible(text)


@pytest.mark.parametrize(
    "text",
    ["." * 100_000, "a" + " " * 100_000 + "b", "\n" * 100_000 + "b", ",'" * 50_000, ".'" * 50_000, "!" + "'" * 100_000,
     "\n " * 50_000 + "b", "a. " * 33_000, "。" * 100_000, "x" * 100_000, "(" * 100_000, "a.b." * 25_000],
    ids=lambda text: repr(text[:4]),
)  # fmt: skip
def test_no_text_takes_long(text: str) -> None:
    start = time.process_time()
    parts = segment(f"Well, {text} so.")
    assert time.process_time() - start < 2
    assert visible("".join(parts)) == visible(f"Well, {text} so.")
