"""`make demo`: start a server with a tiny random checkpoint, ask it to speak once, write a .wav, stop the server.

Standard library only; every wait has a limit. KEEP=1 leaves the server running and says how to stop it.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import wave
from pathlib import Path
from types import FrameType

START_LIMIT_S = 300
SPEECH_LIMIT_S = 180
STOP_LIMIT_S = 45
FOLDER = Path("demo-out")
SPEECH = {"model": "tiny", "input": "Hello from mstar.", "voice": "tara", "response_format": "wav", "seed": 7}


def say(text: str) -> None:
    print(f"== {text}", flush=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(url: str, *, port: int, log: Path) -> subprocess.Popen[bytes]:
    """Start the server in a process group of its own and wait until it is healthy."""
    command = [sys.executable, "-m", "mstar", "serve", "--plugin", "orpheus", "--model", "tiny", "--port", str(port)]
    say(f"starting the server: {shlex.join(['mstar', *command[3:]])}  (log: {log})")
    with log.open("wb") as output:
        server = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        wait_until_healthy(server, url)
    except BaseException:
        stop(server)
        raise
    return server


def wait_until_healthy(server: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RuntimeError(f"the server ended with {server.returncode} before it was ready")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:  # refused, or not ready yet
            time.sleep(0.2)
    raise RuntimeError(f"the server was not ready after {START_LIMIT_S} s")


def stop(server: subprocess.Popen[bytes]) -> None:
    """Ask the server to stop; end it if it does not."""
    if server.poll() is None:
        server.terminate()
        try:
            server.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            say(f"the server did not stop within {STOP_LIMIT_S} s; killing it")
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def speak(url: str, path: Path) -> None:
    """One speech request; the answer goes to `path`, and what is in it is printed."""
    say(f"asking for speech: POST {url}/v1/audio/speech {json.dumps(SPEECH)}")
    request = urllib.request.Request(
        f"{url}/v1/audio/speech", data=json.dumps(SPEECH).encode(), headers={"Content-Type": "application/json"}
    )
    started = time.monotonic()
    try:
        with urllib.request.urlopen(request, timeout=SPEECH_LIMIT_S) as answer:
            path.write_bytes(answer.read())
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"the server answered {error.code}: {error.read().decode(errors='replace')}") from error
    with wave.open(str(path)) as audio:
        seconds, rate = audio.getnframes() / audio.getframerate(), audio.getframerate()
    if not seconds:
        raise RuntimeError(f"{path} holds no sound")
    say(f"{seconds:.2f} s of sound at {rate} Hz after {time.monotonic() - started:.2f} s")
    say("the weights are random, so it is noise: a real checkpoint speaks (see README.md)")


def interrupted(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def main() -> None:
    signal.signal(signal.SIGTERM, interrupted)
    FOLDER.mkdir(exist_ok=True)
    port, log, sound = free_port(), FOLDER / "server.log", FOLDER / "hello.wav"
    url = f"http://127.0.0.1:{port}"
    keep = os.environ.get("KEEP", "") not in ("", "0")
    try:
        server = start(url, port=port, log=log)
        try:
            speak(url, sound)
        except BaseException:
            keep = False
            raise
        finally:
            if not keep:
                say("stopping the server")
                stop(server)
    except RuntimeError as error:
        print(f"demo failed: {error}\n--- last lines of {log}", file=sys.stderr)
        print("\n".join(log.read_text(errors="replace").splitlines()[-30:]), file=sys.stderr)
        sys.exit(1)
    if keep:
        say(f"the server stays up at {url}, process {server.pid}; stop it with: kill {server.pid}")
        say(f"ask it again: curl {url}/v1/audio/speech -H 'Content-Type: application/json' -o again.wav "
            f"-d {shlex.quote(json.dumps(SPEECH))}")  # fmt: skip
    say(f"written: {sound.resolve()}")


if __name__ == "__main__":
    main()
