"""The written rules of docs/architecture.md as tests: import direction, names, budgets, the shape of plugins.

Each rule is a checker function from sources to complaints; the checkers are themselves tested on bad samples below.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CORE = ROOT / "core" / "mstar"
CACHE = ROOT / "compile_cache" / "mstar_compile_cache"
PLUGINS = sorted(path for path in ROOT.glob("plugins/*/mstar_plugin_*") if path.is_dir())
ECHO = ROOT / "tests" / "echo_plugin"

RANKS = {
    "errors": 0, "types": 0, "config": 0, "observe": 0,
    "media": 1,
    "plugin": 2, "layers": 2, "ipc": 2, "client": 2,
    "placement": 3, "worker": 3, "server": 3, "bench": 3, "model": 3,
    "launch": 4, "processes": 4, "worker_process": 4, "planning": 4,
    "cli": 5, "__main__": 6,
}  # fmt: skip
NEVER_EACH_OTHER = {("worker", "server"), ("server", "worker")}

# Beginnings of words. Core must serve models it has never heard of, so it may not name one, not even as an example.
MODEL_WORDS = (
    "orpheus", "canopylabs", "snac", "hubertsiuzdak", "bagel", "siglip", "qwen", "talker", "thinker", "code2wav",
    "vjepa", "jepa", "droid", "llama", "mistral", "gemma", "whisper", "wav2vec",
)  # fmt: skip
FORBIDDEN_NAMES = re.compile(r"(^|_)(utils?|common|managers?|helpers?)$")
PLUGIN_MAY_IMPORT = ("mstar.plugin", "mstar.layers", "mstar.types", "mstar.errors")
PLUGIN_FILES = {
    "__init__", "plugin", "config", "graph", "processing", "nodes", "modeling", "weights", "tiny", "placements",
}  # fmt: skip
NO_TORCH = (
    "graph", "states", "spec", "hooks", "loader", "validate", "program", "draw", "session", "checkpoint", "fields",
)  # fmt: skip

FILE_LINES = 400
FUNCTION_LINES = 60
# Code lines of core by part, before several processes; see the decision in docs/architecture.md.
BUDGETS = {"engine": 12800, "surface": 5800, "tools": 1350}
SURFACE = ("media", "server", "launch", "cli", "__main__", "__init__")  # what a client or an operator meets
TOOLS = ("client", "bench")  # what talks to a server from outside


# ---- checkers ---------------------------------------------------------------------------------------------------


def sources(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def imports(source: str) -> Iterator[str]:
    """Dotted names of everything imported, anywhere in the file: `from a import b` gives "a.b"."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def direction_complaints(component: str, source: str) -> list[str]:
    """What a file of `mstar.<component>` imports against the direction of imports."""
    complaints = []
    for name in imports(source):
        if name.startswith("mstar_plugin"):
            complaints.append(f"imports a plugin: {name}")
        if not name.startswith("mstar.") or name in ("mstar.__version__",):
            continue
        target = name.split(".")[1]
        if target not in RANKS:
            complaints.append(f"imports {name}, which has no place in the order of imports")
        elif RANKS[target] > RANKS[component] or (component, target) in NEVER_EACH_OTHER:
            complaints.append(f"{component} imports {name}")
    return complaints


def plugin_import_complaints(package: str, source: str) -> list[str]:
    """What a plugin imports besides the contract and shared layers."""
    complaints = []
    for name in imports(source):
        top = name.split(".")[0]
        ours = top == "mstar" and not any(name == m or name.startswith(m + ".") for m in PLUGIN_MAY_IMPORT)
        other = top.startswith("mstar_") and top != package
        if ours or other or top in ("core", "plugins"):
            complaints.append(f"imports {name}")
    return complaints


def model_word_complaints(text: str) -> list[str]:
    """Names of models or their components, anywhere: code, comments, docstrings, help."""
    pattern = re.compile(rf"(?<![a-z])v?-?({'|'.join(MODEL_WORDS)})", re.IGNORECASE)
    split = re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", text)  # words inside CamelCase count too
    return [
        f"line {number}: {match[0]!r}"
        for number, line in enumerate(split.splitlines(), 1)
        for match in pattern.finditer(line)
    ]


def code_lines(source: str) -> set[int]:
    """Numbers of the lines that are code: no blanks, comments, docstrings."""
    idle = {
        tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
        tokenize.ENCODING, tokenize.ENDMARKER,
    }  # fmt: skip
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in idle:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        # a string alone is a docstring: of a module, class or function, or of the name above it
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            assert node.end_lineno is not None
            lines.difference_update(range(node.lineno, node.end_lineno + 1))
    return lines


def budget_complaints(source: str) -> list[str]:
    lines = code_lines(source)
    complaints = [f"{len(lines)} code lines; at most {FILE_LINES} in a file"] if len(lines) > FILE_LINES else []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            count = len(lines & set(range(node.lineno, node.end_lineno + 1)))
            if count > FUNCTION_LINES:
                complaints.append(f"{node.name}: {count} code lines; at most {FUNCTION_LINES} in a function")
    return complaints


def name_complaints(stems: list[str], source: str) -> list[str]:
    """Modules and classes named for what they are not."""
    classes = [node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]
    snakes = [re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower() for name in classes]
    return [f"{name} names nothing" for name in stems + snakes if FORBIDDEN_NAMES.search(name)]


def environment_complaints(source: str) -> list[str]:
    """Environment variables are parsed once, in config."""
    return [
        f"line {node.lineno}: reads the environment"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv") and ast.unparse(node.value) == "os"
    ]


def plugin_shape_complaints(names: set[str]) -> list[str]:
    """What a plugin's package lacks, or has besides the files that every plugin has."""
    missing = [f"lacks {name}" for name in sorted(PLUGIN_FILES - names)]
    return missing + [f"has {name} besides the files of every plugin" for name in sorted(names - PLUGIN_FILES)]


# ---- the rules, on the tree --------------------------------------------------------------------------------------


def collected(complaints: dict[Path, list[str]]) -> str:
    return "\n".join(f"{path.relative_to(ROOT)}: {text}" for path, texts in complaints.items() for text in texts)


def component(path: Path) -> str:
    return path.relative_to(CORE).parts[0].removesuffix(".py")


def test_imports_point_one_way() -> None:
    files = [path for path in sources(CORE) if path != CORE / "__init__.py"]
    complaints = {path: direction_complaints(component(path), path.read_text()) for path in files}
    assert not any(complaints.values()), collected(complaints)


def test_the_compile_cache_does_not_know_mstar() -> None:
    found = {path: [n for n in imports(path.read_text()) if n.split(".")[0] == "mstar"] for path in sources(CACHE)}
    assert not any(found.values()), collected(found)


def test_core_names_no_model() -> None:
    complaints = {
        path: model_word_complaints(path.read_text() + "\n" + path.stem)
        for folder in (CORE, CACHE)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix in (".py", ".cpp", ".h", ".cu", ".yaml", ".json", ".typed", ".txt", ".md")
    }
    assert not any(complaints.values()), collected(complaints)


def test_files_functions_and_core_stay_within_their_budgets() -> None:
    files = [*sources(CORE), *sources(CACHE), *(path for plugin in PLUGINS for path in sources(plugin))]
    complaints = {path: budget_complaints(path.read_text()) for path in files}
    assert not any(complaints.values()), collected(complaints)
    totals = dict.fromkeys(BUDGETS, 0)
    for path in sources(CORE):
        of = component(path)
        part = "surface" if of in SURFACE else "tools" if of in TOOLS else "engine"
        totals[part] += len(code_lines(path.read_text()))
    over = {part: f"{total} code lines, at most {BUDGETS[part]}" for part, total in totals.items()}
    assert all(total <= BUDGETS[part] for part, total in totals.items()), f"raised only by decision: {over}"


def test_nothing_is_named_for_what_it_is_not() -> None:
    files = [*sources(CORE), *sources(CACHE), *(path for plugin in PLUGINS for path in sources(plugin))]
    complaints = {
        path: name_complaints([part.removesuffix(".py") for part in path.relative_to(ROOT).parts], path.read_text())
        for path in files
    }
    assert not any(complaints.values()), collected(complaints)


def test_environment_variables_are_read_in_config_alone() -> None:
    files = [path for path in sources(CORE) if path != CORE / "config.py"]
    complaints = {path: environment_complaints(path.read_text()) for path in files}
    assert not any(complaints.values()), collected(complaints)


def test_core_modules_say_what_they_own() -> None:
    bare = [
        str(path.relative_to(ROOT))
        for path in sources(CORE)
        if code_lines(path.read_text()) and not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert not bare, bare


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda path: path.name)
def test_plugins_import_only_the_contract_and_layers(plugin: Path) -> None:
    complaints = {path: plugin_import_complaints(plugin.name, path.read_text()) for path in sources(plugin)}
    assert not any(complaints.values()), collected(complaints)


def test_the_echo_plugin_imports_only_the_contract_and_layers() -> None:
    package = next(ECHO.glob("mstar_plugin_*"))
    complaints = {path: plugin_import_complaints(package.name, path.read_text()) for path in sources(package)}
    assert not any(complaints.values()), collected(complaints)


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda path: path.name)
def test_every_plugin_has_the_same_files(plugin: Path) -> None:
    names = {
        path.stem for path in plugin.iterdir() if path.suffix == ".py" or (path.is_dir() and path.stem != "__pycache__")
    }
    assert not plugin_shape_complaints(names)
    around = plugin.parent
    assert all((around / name).exists() for name in ("pyproject.toml", "README.md", "tests"))
    assert plugin.name == "mstar_plugin_" + around.name


def test_the_contract_imports_without_torch() -> None:
    modules = [f"mstar.plugin.{name}" for name in NO_TORCH if list((CORE / "plugin").glob(f"{name}*"))]
    modules += [f"{plugin.name}.{name}" for plugin in PLUGINS for name in ("plugin", "graph")]
    assert {"mstar.plugin.graph", "mstar.plugin.states", "mstar.plugin.spec", "mstar.plugin.loader"} <= set(modules)
    code = (
        f"import sys, importlib\nsys.path[:0] = {[str(plugin.parent) for plugin in PLUGINS]!r}\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, name + ' imports torch'\n"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert answer.returncode == 0, answer.stderr[-2000:]


@pytest.mark.parametrize(
    "line", ["import core.mstar", "from plugins.x import y", "from core import mstar", "from . import a"]
)
def test_ruff_refuses_second_copies_and_relative_imports(line: str) -> None:
    command = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--select",
        "TID",
        "--no-cache",
        "--stdin-filename",
        "core/x.py",
        "-",
    ]
    answer = subprocess.run(
        command, input=line + "\n", cwd=ROOT, capture_output=True, text=True, timeout=30, check=False
    )
    assert answer.returncode == 1, answer.stdout + answer.stderr
    assert "TID25" in answer.stdout


# ---- the checkers, on bad samples --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("component", "source"),
    [
        ("worker", "from mstar.server import engine"),
        ("server", "import mstar.worker.worker"),
        ("types", "from mstar.plugin.graph import Graph"),
        ("media", "def f():\n    from mstar.plugin import spec"),
        ("launch", "from mstar import cli"),
        ("plugin", "import mstar_plugin_echo.nodes"),
        ("layers", "from mstar import somewhere_new"),
        ("client", "from mstar.server import openai"),
        ("bench", "import mstar.launch"),
    ],
)
def test_a_wrong_import_is_seen(component: str, source: str) -> None:
    assert direction_complaints(component, source)


@pytest.mark.parametrize(
    ("component", "source"),
    [
        ("worker", "from mstar.ipc import messages\nimport mstar.layers.norm\nfrom mstar import errors"),
        ("cli", "from mstar import __version__, launch"),
        ("bench", "from mstar.client import AsyncClient\nfrom mstar.media.audio import decode_audio"),
        ("plugin", "from mstar.layers.attention import KVBatch\nimport torch"),
    ],
)
def test_a_right_import_passes(component: str, source: str) -> None:
    assert not direction_complaints(component, source)


@pytest.mark.parametrize(
    "source",
    ["from mstar.worker import runner", "from mstar import config", "import mstar_plugin_other", "import plugins.x"],
)
def test_a_plugin_reaching_into_the_engine_is_seen(source: str) -> None:
    assert plugin_import_complaints("mstar_plugin_this", source)


def test_a_plugin_may_import_the_contract_and_itself() -> None:
    source = "from mstar.plugin import graph\nimport mstar.layers\nfrom mstar_plugin_this import config\nimport torch"
    assert not plugin_import_complaints("mstar_plugin_this", source)


@pytest.mark.parametrize(
    "text",
    ["# as Orpheus does", "class QwenNode:", "x = 'v-jepa'", "vjepa2", "my_talker_step", "class MyTalker:", "LlamaX"],
)
def test_a_model_name_is_seen_anywhere(text: str) -> None:
    assert model_word_complaints(text)


@pytest.mark.parametrize("text", ["a stalker", "codec, decode", "llm.prefill", "snapshot"])
def test_ordinary_words_are_not_model_names(text: str) -> None:
    assert not model_word_complaints(text)


def test_code_lines_leave_out_blanks_comments_and_docstrings() -> None:
    source = '"""Doc\nmore."""\n\n# why\nx = """a\nb"""\n\n\ndef f():\n    """Doc."""\n    return (\n    1\n    )  #\n'
    assert code_lines(source) == {5, 6, 9, 11, 12, 13}


def test_an_overlong_file_or_function_is_seen() -> None:
    assert not budget_complaints("x = 1\n" * FILE_LINES)
    assert budget_complaints("x = 1\n" * (FILE_LINES + 1))
    assert not budget_complaints("def f():\n" + "    x = 1\n" * (FUNCTION_LINES - 1))
    assert budget_complaints("class A:\n    def f():\n" + "        x = 1\n" * FUNCTION_LINES)


@pytest.mark.parametrize(
    ("stem", "source"), [("utils", ""), ("audio_helpers", ""), ("x", "class KVManager: ..."), ("common", "")]
)
def test_an_empty_name_is_seen(stem: str, source: str) -> None:
    assert name_complaints([stem], source)


def test_a_telling_name_passes() -> None:
    assert not name_complaints(["kv_pool"], "class KVPool: ...\nclass Commons: ...")


def test_reading_the_environment_is_seen() -> None:
    assert environment_complaints("import os\nx = os.environ.get('A')")
    assert environment_complaints("import os\nx = os.getenv('A')")
    assert not environment_complaints("import os\nx = os.cpu_count()")


def test_a_plugin_of_another_shape_is_seen() -> None:
    assert plugin_shape_complaints(PLUGIN_FILES - {"tiny"}) == ["lacks tiny"]
    assert plugin_shape_complaints(PLUGIN_FILES | {"misc"}) == ["has misc besides the files of every plugin"]
