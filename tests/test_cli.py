"""The command line: what exists, what it passes on, how it fails. Runs no model."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file

import mstar
from mstar import config
from mstar.cli import cli, main
from mstar.config import EngineConfig, ServerConfig, read_environment
from mstar.plugin import loader
from mstar.plugin.loader import InstalledPlugin, LoadedPlugin
from mstar.plugin.spec import Task

COMMANDS = ["bench", "cache", "compile", "doctor", "graph", "plan", "plugins", "run", "serve"]
OWN_FLAGS = {
    "serve": {"--config"},
    "run": {
        "--audio",
        "--config",
        "--image",
        "--log-level",
        "--num-frames",
        "--out",
        "--outputs",
        "--param",
        "--plot",
        "--request",
        "--seed",
        "--task",
        "--tensor",
        "--text",
        "--video",
        "--voice",
    },
    "bench": set(),
    "cache": set(),
    "compile": {"--config", "--json", "--log-level"},
    "graph": {"--format", "--model", "--output", "--plans", "--plugin"},
    "plugins": {"--json"},
    "plan": {"--devices", "--format", "--list", "--tensor-parallel-size"},
    "doctor": {"--host", "--model", "--placement", "--plugin", "--port", "--url"},
}
SERVER_ONLY = {
    "--served-model-name", "--max-queue", "--session-ttl", "--max-sessions", "--stall-timeout",
    "--allowed-local-media-path", "--workers",
}  # fmt: skip
MEDIA = {
    "--allowed-media-domains", "--max-media-bytes", "--media-memory-bytes", "--max-image-pixels", "--max-video-frames",
    "--max-audio-duration", "--max-video-duration", "--limit-mm-per-prompt", "--encoder-cache-bytes", "--media-timeout",
}  # fmt: skip
PLANNED = {
    "--plugin", "--model", "--set", "--dtype", "--max-model-len", "--max-num-seqs", "--max-num-batched-tokens",
    "--block-size", "--kv-cache-memory-bytes", "--placement",
}  # fmt: skip
NOT_COMPILED = MEDIA | {
    "--placement",
    "--kv-transfer",
    "--request-timeout",
    "--start-timeout",
    "--seed",
    "--compile",
    "--enforce-eager",
    "--batch-invariant",
}

PLUGIN = """
from mstar.plugin.graph import Call, Graph, Method, Node, Port, Walk
from mstar.plugin.hooks import hookimpl
from mstar.plugin.spec import ModelSpec, Task
from mstar.plugin.states import Start, States

def build(config):
    node = Node("speak", (Method(name="say", inputs=(Port("x"),), outputs=(Port("y"),)),))
    walk = Walk(name="main", section=Call("speak.say", emits={"y": "y"}), inputs=("x",))
    return Graph(nodes=(node,), walks=(walk,), states=States((Start(walk="main"),)))

@hookimpl
def register_models(register):
    register(ModelSpec(
        name="parrot", graph=build, config="parrot_plugin:build", checkpoint="nobody/parrot",
        processor="parrot_plugin:build", nodes={"speak": "parrot_plugin:build"},
        tasks={"repeat": Task(params=dict, inputs=("text",), outputs=("text", "audio"))},
    ))
"""


def install(folder: Path, *, name: str, module: str, source: str) -> None:
    """Lay out an installed distribution with one plugin, as pip would."""
    (folder / f"{module}.py").write_text(source)
    info = folder / f"mstar_plugin_{name}-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: mstar-plugin-{name}\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(f"[mstar]\n{name} = {module}\n")


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """`run(*arguments)` -> exit code, standard output, standard error."""

    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
        shown = capsys.readouterr()
        code = ended.value.code
        return (code if isinstance(code, int) else 0 if code is None else 1), shown.out, shown.err

    return call


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What was passed on to `mstar.launch`; nothing is started. Exits with 7."""
    calls: list[tuple[Any, ...]] = []
    launch = ModuleType("mstar.launch")

    def serve(engine: EngineConfig, server: ServerConfig) -> int:
        calls.append((engine, server))
        return 7

    def run(engine: EngineConfig, request: dict[str, Any], *, out: Path, base: Path, plot: bool) -> int:
        calls.append((engine, request, out, base, plot))
        return 7

    launch.serve, launch.run = serve, run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mstar.launch", launch)
    monkeypatch.setattr(mstar, "launch", launch, raising=False)
    return calls


def only_installed(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    plugins = [InstalledPlugin(name=n, distribution=f"mstar-plugin-{n}", version="1.0", value="x") for n in names]
    monkeypatch.setattr(loader, "installed", lambda: plugins)


# ---- what there is ----------------------------------------------------------------------------------------------


def test_the_lists_of_commands_and_their_flags_are_frozen() -> None:
    """Adding one is a decision: it arrives with its feature, and a change here and in docs/serving.md."""
    assert sorted(cli.commands) == COMMANDS
    from_table = {
        "serve": flags_of(EngineConfig) | flags_of(ServerConfig),
        "run": flags_of(EngineConfig) - SERVER_ONLY,
        "bench": set(),
        "cache": set(),
        "compile": flags_of(EngineConfig) - SERVER_ONLY - NOT_COMPILED,
        "graph": set(),
        "plugins": set(),
        "plan": PLANNED,
        "doctor": set(),
    }
    for name, command in cli.commands.items():
        found = {option for parameter in command.params for option in parameter.opts if option.startswith("--")}
        assert found == OWN_FLAGS[name] | from_table[name], name


def flags_of(kind: type[Any]) -> set[str]:
    return {flag.name for flag in mstar.config.flags(kind).values()}


def test_help_and_version_import_nothing_heavy() -> None:
    code = (
        "import sys\nfrom mstar.cli import main\n"
        "for arguments in (['--help'], ['serve', '--help'], ['run', '--help'], ['compile', '--help'], ['--version']):\n"
        "    try:\n        main(arguments)\n    except SystemExit as ended:\n        assert not ended.code\n"
        "heavy = {'torch', 'numpy', 'transformers', 'starlette', 'av'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert answer.returncode == 0, answer.stderr
    assert f"mstar, version {mstar.__version__}" in answer.stdout


def test_help_gives_units_and_defaults(run: Run) -> None:
    code, out, _ = run("serve", "--help")
    words = " ".join(out.split())
    assert code == 0
    assert "tokens in a page of KV cache [default: 64]" in words
    assert "in GiB; 0: recompute instead [default: 1]" in words


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["sevre"], "did you mean serve?"),
        (["serve", "--max-num-seq", "3"], "--max-num-seqs"),
        (["serve", "--max-num-seqs", "many"], "'--max-num-seqs': 'many': expected a whole number"),
        (["serve", "--max-num-seqs", "0", "--plugin", "x"], "--max-num-seqs is 0; it must be at least 1"),
        (["serve", "--kv-cache-memory-bytes", "9" * 400, "--plugin", "x"], "less than 8 EiB"),
        (["serve", "--swap-space", "1e308", "--plugin", "x"], "less than 8 EiB"),
        (["run", "--text", "a\udcff", "--plugin", "echo"], "valid Unicode"),
        (["run", "--text", "a", "--param", "k\udcff=1", "--plugin", "echo"], "valid Unicode"),
        (["run", "--text", "a", "--param", "x=" + "[" * 50_000, "--plugin", "echo"], "'params.x' is unknown"),
        (["serve", "--dtype", "int4", "--plugin", "x"], "must be one of auto, float32"),
        (["serve", "--set", "codec", "--plugin", "x"], "expected part=PATH"),
        (["serve", "a", "--model", "b", "--plugin", "x"], "given twice"),
        (["serve", "--ssl-keyfile", "k.pem", "--plugin", "x"], "--ssl-keyfile is given without --ssl-certfile"),
        (["serve", "--allowed-origins", "https://a/b", "--plugin", "x"], "must be '*' or like https://"),
        (["serve", "--config", "absent.yaml"], "--config absent.yaml: No such file"),
        (["run", "--plugin", "x"], "either --request FILE or --text TEXT"),
        (["run", "--text", "a", "--request", "b"], "either --request FILE or --text TEXT"),
        (["run", "--request", "absent.json"], "absent.json: No such file"),
        (["run", "--text", "a", "--param", "voice"], "expected KEY=VALUE"),
        (["graph", "--plugin", "nosuch"], "no plugin 'nosuch' is installed"),
        (["graph", "--plugin", "echo", "-o", "g.xyz"], "nothing is drawn by suffix '.xyz'; use .svg, .mmd, .md, .txt"),
        (["serve", "tinny", "--plugin", "echo"], "neither a folder nor a hub id (OWNER/NAME); did you mean tiny?"),
        (
            ["serve", "--tensor-parallel-size", "2"],
            "no --tensor-parallel-size: 'tensor_parallel' in a file for --placement",
        ),
        (["serve", "--omni"], "no --omni: every model is served with all that it can do; leave it out"),
        (["run", "--image", "absent.png", "--plugin", "x"], "absent.png: there is no such file"),
    ],
)
def test_a_mistake_is_one_clear_line_and_exit_code_2(run: Run, arguments: list[str], words: str) -> None:
    code, _, err = run(*arguments)
    assert code == 2
    assert words in err
    assert "Traceback" not in err


@pytest.mark.parametrize("command", ["serve", "run", "compile"])
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--plugin", "echoo"], "no plugin 'echoo' is installed; did you mean echo?"),
        (["--plugin", "echo", "--model", "/no/such/folder"], "--model /no/such/folder is neither a folder nor"),
    ],
)
def test_what_is_not_there_is_said_before_anything_heavy_is_imported(
    command: str, arguments: list[str], words: str
) -> None:
    more = ["--text", "a"] if command == "run" else []
    code = (
        "import sys\nfrom mstar.cli import main\n"
        f"try:\n    main({[command, *more, *arguments]!r})\n"
        "except SystemExit as ended:\n    assert ended.code == 2\n"
        "heavy = {'torch', 'numpy', 'transformers', 'starlette', 'av'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert answer.returncode == 0, answer.stderr
    assert answer.stderr.startswith("Error: ") and words in answer.stderr and answer.stderr.count("\n") == 1


def test_ctrl_c_ends_quietly(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> list[InstalledPlugin]:
        raise KeyboardInterrupt

    monkeypatch.setattr(loader, "installed", interrupt)
    code, out, err = run("plugins")
    assert code == 130
    assert not out
    assert "Traceback" not in err


# ---- serve ------------------------------------------------------------------------------------------------------


def test_serve_passes_settings_on_and_ends_with_the_server_s_code(run: Run, launched: list[tuple[Any, ...]]) -> None:
    code, _, _ = run(
        *"serve org/model --plugin echo --port 0 --served-model-name a --served-model-name b --swap-space 0.5".split(),
        *"--no-enable-prefix-caching --batch-invariant --set codec=/x --kv-cache-memory-bytes 2MiB".split(),
    )
    (engine, server) = launched[0]
    assert code == 7
    assert engine == EngineConfig(
        plugin="echo", model="org/model", served_model_name=("a", "b"), swap_space_bytes=512 * 1024**2,
        enable_prefix_caching=False, batch_invariant=True, parts={"codec": Path("/x")},
        kv_cache_memory_bytes=2 * 1024**2,
    )  # fmt: skip
    assert server == ServerConfig(port=0)


def test_a_key_comes_from_a_flag_or_else_the_environment_and_is_never_shown(
    run: Run, launched: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "correct-horse-battery"
    monkeypatch.setattr(config, "environment", lambda: read_environment({"MSTAR_API_KEY": secret}))
    run("serve", "--plugin", "echo")
    run("serve", "--plugin", "echo", "--api-key", "one", "--api-key", "two")
    assert [server.api_key for _, server in launched] == [(secret,), ("one", "two")]
    assert secret not in repr(launched)
    code, out, err = run("serve", "--plugin", "echo", "--api-key", f"{secret} x")
    assert code == 2
    assert "--api-key" in err
    assert secret not in out + err
    assert secret not in run("serve", "--help")[1]


def test_the_command_line_wins_over_the_file(run: Run, launched: list[tuple[Any, ...]], tmp_path: Path) -> None:
    path = tmp_path / "mstar.yaml"
    path.write_text(
        "plugin: echo\nmodel: from/file\nmax-num-seqs: 4\nport: 9000\nset: {codec: /x}\nbatch-invariant: true\n"
    )
    run("serve", "from/flag", "--config", str(path), "--max-num-seqs", "5", "--no-batch-invariant")
    engine, server = launched[0]
    assert (engine.plugin, engine.model, engine.max_num_seqs, engine.batch_invariant) == ("echo", "from/flag", 5, False)
    assert engine.parts == {"codec": Path("/x")}
    assert server.port == 9000


@pytest.mark.parametrize(
    ("placement", "words"),
    [
        (["--placement", "nothing"], "--placement nothing is neither a file nor a placement of 'echo'"),
        (["--placement", "pd", "--workers", "2"], "--placement and --workers exclude each other"),
    ],
)
def test_a_wrong_placement_is_said_before_anything_is_loaded(
    run: Run, launched: list[tuple[Any, ...]], placement: list[str], words: str
) -> None:
    code, _, err = run("serve", "--plugin", "echo", *placement)
    assert code == 2 and words in err and not launched


def test_without_plugin_the_only_one_installed_is_used_and_named(
    run: Run, launched: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    only_installed(monkeypatch, "echo")
    _, _, err = run("serve")
    assert launched[0][0].plugin == "echo"
    assert "using plugin 'echo', the only one installed" in err


def test_without_plugin_several_installed_are_listed(
    run: Run, launched: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    only_installed(monkeypatch, "echo", "parrot")
    code, _, err = run("serve")
    assert code == 2
    assert "--plugin is missing" in err
    assert "echo, parrot" in err
    assert not launched


def test_without_plugin_the_one_whose_published_checkpoint_is_asked_for_is_used(
    run: Run, launched: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    only_installed(monkeypatch, "echo", "parrot")
    _, _, err = run("serve", "mstar/echo")
    assert (launched[0][0].plugin, launched[0][0].model) == ("echo", "mstar/echo")
    assert "using plugin 'echo', whose published checkpoint this is" in err


def test_without_any_plugin_serve_says_how_to_get_one(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    only_installed(monkeypatch)
    code, _, err = run("serve")
    assert code == 2
    assert "pip install mstar-plugin-" in err


# ---- run --------------------------------------------------------------------------------------------------------


def test_run_builds_a_request_from_flags(run: Run, launched: list[tuple[Any, ...]], tmp_path: Path) -> None:
    run(
        *"run --plugin echo --text".split(), "good day", *"--voice nobody --param top_k=5 --param tone=calm".split(),
        *"--param stop=[1,2] --task speech --seed 7 --tensor codes=c.safetensors --plot --out".split(), str(tmp_path),
    )  # fmt: skip
    engine, request, out, base, plot = launched[0]
    assert engine == EngineConfig(plugin="echo")
    assert request == {
        "inputs": [
            {"type": "tensor", "name": "codes", "tensor": {"file": "c.safetensors", "name": "codes"}},
            {"type": "text", "text": "good day"},
        ],
        "task": "speech",
        "seed": 7,
        "params": {"top_k": 5, "tone": "calm", "stop": [1, 2], "voice": "nobody"},
    }
    assert (out, base, plot) == (tmp_path, Path.cwd(), True)


def test_run_reads_a_request_file_and_its_folder_is_where_paths_start(
    run: Run, launched: list[tuple[Any, ...]], tmp_path: Path
) -> None:
    path = tmp_path / "request.json"
    path.write_text('{"inputs": [], "params": {"a": 1, "b": 2}}')
    code, _, _ = run("run", "--plugin", "echo", "--request", str(path), "--param", "b=3", "--model", "m/n")
    engine, request, out, base, plot = launched[0]
    assert code == 7
    assert engine.model == "m/n"
    assert request == {"inputs": [], "params": {"a": 1, "b": 3}}
    assert (out, base, plot) == (Path("mstar-out"), tmp_path, False)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "not JSON"),
        (b"[]", "a request is a JSON object"),
        (b"\xff\x00\x89PNG", "not JSON"),
        (b'{"a": "\xff"}', "not JSON"),
        (b'{"a":' + b"[" * 100_000, "not JSON"),
        (b'{"inputs": [], "params": [1]}', "params: must be object"),
    ],
)
def test_run_refuses_what_is_no_request(run: Run, tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "request.json"
    path.write_bytes(content)
    code, _, err = run("run", "--plugin", "echo", "--request", str(path), "--voice", "x")
    assert code == 2
    assert words in err


@pytest.mark.parametrize(("fields", "param"), [(("speaker", "n"), "speaker"), (("voice", "speaker"), "voice")])
def test_run_gives_what_is_wanted_and_the_voice_by_the_name_the_model_has(
    run: Run, launched: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, fields: tuple[str, ...], param: str
) -> None:
    task = Task(params=msgspec.defstruct("Params", [(name, str, "") for name in fields]))
    spec = replace(loader.load("echo").spec, tasks={"speech": task})
    monkeypatch.setattr(loader, "load", lambda name: LoadedPlugin(spec=spec, distribution="d", version="1"))
    run(*"run --plugin echo --text hello --outputs".split(), "text, audio", "--voice", "nobody")
    request = launched[0][1]
    assert request["outputs"] == ["text", "audio"] and request["params"] == {param: "nobody"}


def test_run_refuses_settings_that_only_a_server_has(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "mstar.yaml"
    path.write_text("max-queue: 3")
    code, _, err = run("run", "--text", "a", "--config", str(path))
    assert code == 2
    assert "'max-queue' has no meaning for 'mstar run'" in err


# ---- plugins, graph, doctor --------------------------------------------------------------------------------------


@pytest.fixture
def parrot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin that works and one that does not, installed."""
    install(tmp_path, name="parrot", module="parrot_plugin", source=PLUGIN)
    install(tmp_path, name="broken", module="broken_plugin", source="import nothing_like_this")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("parrot_plugin", "broken_plugin"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.usefixtures("parrot")
def test_plugins_lists_what_is_installed_and_what_is_broken(run: Run) -> None:
    code, out, _ = run("plugins", "--json")
    rows = {row["name"]: row for row in json.loads(out)}
    assert code == 0
    assert rows["parrot"]["distribution"] == "mstar-plugin-parrot"
    assert rows["parrot"]["version"] == "1.2"
    assert rows["parrot"]["tasks"] == ["repeat"]
    assert rows["parrot"]["modalities_out"] == ["text", "audio"]
    assert "nothing_like_this" in rows["broken"]["error"]


@pytest.mark.usefixtures("parrot")
def test_plugins_prints_a_table(run: Run) -> None:
    code, out, _ = run("plugins")
    assert code == 0
    assert all(word in out for word in ("parrot", "mstar-plugin-parrot", "1.2", "repeat", "nobody/parrot", "broken"))


@pytest.mark.usefixtures("parrot")
def test_graph_draws_in_the_style_of_the_file_s_suffix(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("graph", "--plugin", "parrot")
    assert code == 0
    assert "speak.say" in out
    for name, beginning in (("g.svg", "<svg"), ("g.mmd", "flowchart"), ("g.txt", "")):
        assert run("graph", "--plugin", "parrot", "-o", str(tmp_path / name))[0] == 0
        assert beginning in (tmp_path / name).read_text()


def test_graph_prints_the_plans_of_loops(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("graph", "--plugin", "echo", "--plans")
    assert code == 0
    assert "walk frames, loop 'frames' (at most max_frames times)\n  one method: lm.frame, depth.start, 3 × " in out
    assert "walk branches, loop (rounds times)\n  not fused: loop (steps times) in it has a count that is no " in out
    assert run("graph", "--plugin", "echo", "--plans", "-o", str(tmp_path / "plans.txt"))[0] == 0
    assert (tmp_path / "plans.txt").read_text().startswith("walk generate, loop (at most max_tokens times)\n")


@pytest.mark.usefixtures("parrot")
def test_doctor_names_each_problem_with_its_remedy(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = run("doctor", "--port", "0")
    lines = out.splitlines()
    broken = next(number for number, line in enumerate(lines) if "plugin broken" in line)
    assert code == 1
    assert lines[broken].startswith("problem")
    assert "-> pip install --upgrade mstar-plugin-broken" in lines[broken + 1]
    assert any(line.startswith("ok") and "plugin parrot" in line for line in lines)
    assert all(any(word in line for line in lines) for word in ("torch", "threads", "shared memory", "cache folder"))


def test_doctor_refuses_ports_there_are_none_and_wrong_variables(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = run("doctor", "--port", "99999")
    assert code == 1 and "port must be 0-65535" in out
    monkeypatch.setattr(config, "environment", lambda: read_environment({"MSTAR_LOG_LEVEL": "loud"}))
    code, out, err = run("doctor", "--port", "0")
    assert code == 2 and "MSTAR_LOG_LEVEL is 'loud'" in err and not out


def test_doctor_only_notes_a_model_that_is_yet_to_be_downloaded(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    only_installed(monkeypatch, "echo")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    asked = ("doctor", "--port", "0", "--plugin", "echo", "--model", "nobody/nothing-like-this")
    code, out, _ = run(*asked)
    assert code == 0, out
    assert "note    checkpoint     'nobody/nothing-like-this' will be downloaded from the hub at first use" in out
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    code, out, _ = run(*asked)
    assert code == 1
    assert "is not in the hub's cache (HF_HOME), and HF_HUB_OFFLINE is set" in out


@pytest.mark.parametrize(
    ("compiler", "path"), [("/bin/false", "plain torch, which is slower"), ("no-such", "plain torch")]
)
def test_doctor_says_what_attention_runs_on_where_the_compiler_does_not_work(
    run: Run, monkeypatch: pytest.MonkeyPatch, compiler: str, path: str
) -> None:
    only_installed(monkeypatch, "echo")
    monkeypatch.setattr(config, "environment", lambda: read_environment({"CXX": compiler}))
    code, out, _ = run("doctor", "--port", "0")
    lines = [line.split(maxsplit=2) for line in out.splitlines() if line[8:17] in ("compiler ", "attention")]
    assert code == 0, out
    assert [line[:2] for line in lines] == [["note", "compiler"], ["note", "attention"]]
    assert compiler in lines[0][2] and lines[1][2].startswith(path)


class Health(BaseHTTPRequestHandler):
    """Answers what a test has set."""

    status, body = 200, b""

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_doctor_shows_a_server_and_each_of_its_workers(run: Run) -> None:
    workers = [
        {"worker": 0, "state": "ready", "pid": 71, "running": 3, "restarts": 0, "detail": None,
         "group": "lm", "role": "lm.decode"},
        {"worker": 1, "state": "restarting", "pid": None, "running": 0, "restarts": 2,
         "detail": "ended by SIGKILL", "group": "codec", "role": "everything else"},
    ]  # fmt: skip
    with HTTPServer(("127.0.0.1", 0), Health) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"

        def lines(status: int, body: dict[str, Any]) -> tuple[int, list[str]]:
            Health.status, Health.body = status, json.dumps(body).encode()
            code, out, _ = run("doctor", "--url", url)
            return code, out.splitlines()

        code, found = lines(200, {"status": "degraded", "workers": workers})
        assert code == 1 and found[0].split() == ["ok", "server", "degraded"]
        assert found[1].startswith("ok") and "ready, lm (lm.decode), process 71, 3 running, 0 restarts" in found[1]
        assert found[2].startswith("problem") and "worker 1" in found[2] and "ended by SIGKILL" in found[2]
        assert lines(200, {"status": "ok"})[0] == 0
        code, found = lines(503, {"error": {"message": "worker 1 has ended"}, "workers": workers})
        assert code == 1 and "worker 1 has ended" in found[0] and "codec (everything else)" in " ".join(found)
        assert "no server of mstar answers" in lines(200, {"other": 1})[1][0]
        server.shutdown()
    code, out, _ = run("doctor", "--url", url)
    assert code == 1 and "no server of mstar answers" in out


def test_doctor_says_which_workers_a_placement_starts(run: Run, tmp_path: Path) -> None:
    def line(placement: str) -> str:
        _, out, _ = run("doctor", "--port", "0", "--plugin", "echo", "--placement", placement)
        return next(line for line in out.splitlines() if "placement" in line)

    assert line("pd").endswith("2 workers: prefill (lm.prefill, lm.read, lm.push), decode (everything else)")
    path = tmp_path / "mine.yaml"
    path.write_text("groups: [{nodes: ['*'], replicas: 2, devices: ['cuda:7']}]")
    assert line(str(path)).startswith("problem") and "has cuda:7, but torch sees" in line(str(path))
    assert "neither a file nor a placement of 'echo'; those are: colocated, disaggregated" in line("nothing")


def test_doctor_checks_a_checkpoint_and_says_what_it_lacks(run: Run, tmp_path: Path) -> None:
    def line(*arguments: str) -> str:
        _, out, _ = run("doctor", "--port", "0", "--plugin", "echo", *arguments)
        return next(line for line in out.splitlines() if line[8:18] == "checkpoint")

    assert line().startswith("ok")
    assert "is neither a folder nor a hub id" in line("--model", str(tmp_path / "absent"))
    (tmp_path / "config.json").write_text('{"model_type": "other"}')
    assert "its model_type is not 'echo'" in line("--model", str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "echo"}')
    assert "has no weights" in line("--model", str(tmp_path))
    save_file({"w": torch.zeros(4)}, tmp_path / "model-1.safetensors")
    assert "1 tensors" in line("--model", str(tmp_path))
    shards = {"w": "model-1.safetensors", "v": "model-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    found = line("--model", str(tmp_path))
    assert found.startswith("problem")
    assert "model-2.safetensors" in found
