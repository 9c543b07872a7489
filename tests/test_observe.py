"""Log lines: once, at the level asked for, without secrets or encoded media."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from mstar.observe import about, hide, printable, progress, redact, setup_logging, size_text


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_line_is_written_once_however_often_logging_is_set_up(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("info")
    setup_logging("info")
    logging.getLogger("mstar.somewhere").info("hello")
    assert capsys.readouterr().err.count("hello") == 1


def test_the_level_can_be_changed_and_libraries_speak_only_of_problems(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("debug")
    logging.getLogger("mstar.x").debug("detail")
    logging.getLogger("mstar_plugin_x").info("from a plugin")
    logging.getLogger("some.library").info("chatter")
    logging.getLogger("some.library").warning("trouble")
    setup_logging("error")
    logging.getLogger("mstar.x").warning("unseen")
    shown = capsys.readouterr().err
    assert [text in shown for text in ("detail", "from a plugin", "chatter", "trouble", "unseen")] == [
        True, True, False, True, False,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("Authorization: Bearer abc.def-123", "abc.def-123"),
        ("headers {'authorization': 'Basic dXNlcjpwdw=='}", "dXNlcjpwdw"),
        ("api_key=sesame; host=x", "sesame"),
        ("MSTAR_API_KEY=sesame", "sesame"),
        ("mstar serve --api-key sesame --port 1", "sesame"),
        ("using hf_abcdefghijklmnopqrst", "abcdefghijklmnopqrst"),
        ("fetching https://user:sesame@host/path", "sesame"),
        ("data:audio/wav;base64," + "QUJD" * 100, "QUJDQUJD"),
    ],
)
def test_secrets_and_encoded_media_are_cut_out(text: str, secret: str) -> None:
    assert secret not in redact(text)


@pytest.mark.parametrize(
    "text", ["stop token: 128258", "token_ids: [1, 2]", "max_tokens=12, key main", "/a/b/c.bin", "--ssl-keyfile k.pem"]
)
def test_ordinary_lines_stay_as_they_are(text: str) -> None:
    assert redact(text) == text


def test_a_key_that_is_known_is_cut_out_wherever_it_stands() -> None:
    hide(["correct-horse-battery", "short"])
    assert redact("query ?k=correct-horse-battery&x") == "query ?k=***&x"
    assert redact("a short line") == "a short line"


def test_tracebacks_are_redacted_too(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("info")
    try:
        raise ValueError("password=sesame")
    except ValueError:
        logging.getLogger("mstar.x").exception("failed")
    shown = capsys.readouterr().err
    assert "ValueError" in shown
    assert "sesame" not in shown


def test_progress_ends_with_one_line_that_says_how_much_was_done(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("info")
    with progress("loading weights", 3 * 2**20, "bytes") as advance:
        advance(2**20)
        advance(2**21)
    with progress("reading", None, "files") as advance:
        advance(1)
    shown = capsys.readouterr().err
    assert "loading weights: 3.0 MiB in" in shown
    assert "reading: 1 files in" in shown


def test_progress_says_what_it_is_about(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("info")
    with about("encoder"), progress("loading 3 tensors", 1, "bytes"):
        pass
    with progress("reading", None, "files"):
        pass
    shown = capsys.readouterr().err
    assert ": encoder: loading 3 tensors" in shown and ": reading" in shown


def test_sizes_are_told_in_a_unit_that_suits_them() -> None:
    assert [size_text(size) for size in (0, 400_000, 3 * 2**30)] == ["0.0 MiB", "0.4 MiB", "3.00 GiB"]


def test_the_http_server_speaks_under_its_own_name(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("info")
    speaker = logging.getLogger("uvicorn.error")
    before = speaker.level
    speaker.setLevel(logging.INFO)  # servers of other tests may have made it quieter
    try:
        speaker.info("Shutting down")
        speaker.error("ASGI callable returned without completing response.")
    finally:
        speaker.setLevel(before)
    shown = capsys.readouterr().err
    assert "uvicorn: Shutting down" in shown and "ASGI" not in shown


def test_what_a_terminal_would_obey_is_escaped() -> None:
    assert printable("a\tb\nné 狐") == "a\tb\nné 狐"
    assert printable("\x1b[2J\r\u202e\x00") == r"\x1b[2J\r\u202e\x00"
