"""Compiling into an entry so that later processes compile nothing: TorchInductor's caches, AOTInductor packages.

Imports torch when called, and of its compiler only what is needed: loading a package imports none of it.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mstar_compile_cache.entry import StoreError

if TYPE_CHECKING:
    import torch

# Weights stay outside of packages, all of them: inductor would write values of up to 8 elements into the code, and
# other weights of the same shapes would then give wrong results.
_PACKAGE_OPTIONS = {
    "aot_inductor.package": True,
    "aot_inductor.package_constants_in_so": False,
    "aot_inductor.package_constants_on_disk_format": "pickle_weights",  # gives them to us
    "aot_inductor.precompile_headers": True,
    "always_keep_tensor_constants": True,
}
_SCRATCH = "mstar-compile-"  # then the process's number and a random word
_CODE, _CONSTANTS = ".so", ".constants"  # suffixes of what lies beside a package, or in its place


@contextlib.contextmanager
def inductor_environment(folder: Path) -> Iterator[None]:
    """Let `torch.compile` keep what it makes in a folder, and find it there: call what was compiled inside.

    Use it in `build` and, around the first calls, in the processes that load the entry.
    """
    from torch._inductor import cpu_vec_isa

    for probe in (cpu_vec_isa.valid_vec_isa_list, getattr(cpu_vec_isa.VecISA, "_VecISA__bool__impl", None)):
        getattr(probe, "cache_clear", lambda: None)()  # its answer is a compiled file too
    with _writing_to(folder):
        yield


@contextlib.contextmanager
def _writing_to(folder: Path) -> Iterator[None]:
    import torch._functorch.config
    import torch._inductor.config
    from torch._inductor.utils import clear_caches

    clear_caches()  # else what this process has compiled before would not be written again
    settings = {"fx_graph_cache": True, "fx_graph_remote_cache": False, "cpp_cache_precompile_headers": False}
    variables = {"TORCHINDUCTOR_CACHE_DIR": str(folder), "TRITON_CACHE_DIR": str(folder / "triton")}
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        with (
            torch._inductor.config.patch(settings),
            torch._functorch.config.patch(enable_autograd_cache=True, enable_remote_autograd_cache=False),
        ):
            yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


@functools.cache
def _scratch() -> Path:
    """Where this process compiles, so that headers are compiled once for all it does."""
    remove_abandoned(Path(tempfile.gettempdir()))
    folder = tempfile.TemporaryDirectory(prefix=f"{_SCRATCH}{os.getpid()}-")
    atexit.register(folder.cleanup)
    fcntl.flock(os.open(folder.name, os.O_RDONLY), fcntl.LOCK_EX)  # for those who cannot see this process
    return Path(folder.name)


def remove_abandoned(parent: Path) -> None:
    """Remove the scratch folders that processes of ours, which were killed, have left in a folder."""
    for folder in parent.glob(f"{_SCRATCH}*-*"):
        pid = folder.name.removeprefix(_SCRATCH).partition("-")[0]
        with contextlib.suppress(OSError):  # somebody else removes it, or holds it
            if not pid.isdecimal() or folder.lstat().st_uid != os.getuid() or _is_running(int(pid)):
                continue
            opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(opened)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def aot_compile(
    program: torch.nn.Module | Callable[..., Any],
    args: tuple[Any, ...],
    *,
    out: Path,
    dynamic_shapes: Any = None,
    options: Mapping[str, Any] | None = None,
) -> None:
    """Compile a module or a function of tensors ahead of time into a package, without its weights.

    Args:
        args: example inputs; those of dynamic size are best of size 2 or more.
        out: name of the package, such as FOLDER/step.pt2, for `aot_load`; it may become several files of that stem.
        dynamic_shapes: as for `torch.export.export`, such as `({0: Dim("batch", min=1, max=16)},)`.
        options: inductor settings, which belong into the key.

    Raises ValueError for a module that writes to its buffers, as compiled code would not keep that.
    """
    import torch._inductor
    from torch._inductor.package import package_aoti

    module = program if isinstance(program, torch.nn.Module) else _as_module(program)
    with warnings.catch_warnings(), _writing_to(_scratch()), torch.no_grad():
        warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning)  # torch's
        exported = torch.export.export(module, args, dynamic_shapes=dynamic_shapes)
        functional = exported.run_decompositions({}).graph_signature
        if functional.buffers_to_mutate:
            names = ", ".join(sorted(set(functional.buffers_to_mutate.values())))
            raise ValueError(f"it writes to its buffers {names}, which compiled code would not keep")
        made: Any = torch._inductor.aot_compile(exported.module(), args, options=_PACKAGE_OPTIONS | dict(options or {}))
        files: list[Any] = [file for file in made if isinstance(file, str)]
        (values,) = (file for file in made if isinstance(file, dict))
        codes = [file for file in files if file.endswith(".so")]
        # a list of calls is there if some operator must be called by way of the dispatcher, which torch's loader does
        has_calls = any(file.endswith(".json") and not file.endswith("_metadata.json") for file in files)
        tensors = [value for value in (*args, *(value for value, _ in values.values())) if hasattr(value, "device")]
        if len(codes) == 1 and not has_calls and all(tensor.device.type == "cpu" for tensor in tensors):
            shutil.move(codes[0], out.with_suffix(_CODE))
        else:
            package_aoti(str(out), files)
    weights = {name: _layout(value) for name, value in exported.state_dict.items()}
    constants = {name: value for name, (value, _) in values.items() if name not in weights}
    torch.save({"constants": constants, "weights": weights}, out.with_suffix(_CONSTANTS))


class Program:
    """A loaded package: called like what was compiled, with positional arguments. The GIL is free while it runs.

    Not free for packages that call operators without a C shim, nor for those of accelerators, where calls are short.

    Attributes:
        code: `aoti.CompiledCode`, or torch's loader for such packages.
    """

    def __init__(self, loader: Any, *, tensors: Mapping[str, torch.Tensor]) -> None:
        from torch.utils import _pytree as pytree

        self._tensors = tensors  # kept alive, as the package holds pointers into them
        self.code = loader
        self._run = loader.boxed_run
        self._leaves = pytree.tree_leaves
        self._result = pytree.treespec_loads(loader.get_call_spec()[1]).unflatten

    def __call__(self, *args: Any) -> Any:
        return self._result(self._run([leaf for leaf in self._leaves(args) if hasattr(leaf, "data_ptr")]))


def aot_load(package: Path, *, weights: Mapping[str, torch.Tensor] | None = None) -> Program:
    """Load a package that `aot_compile` wrote; compiles nothing and copies no weights.

    Args:
        weights: the module's `state_dict()`. Shared, not copied: what is written into them later is seen, and several
            packages can use one set. StoreError if they are not laid out as those compiled with.
    """
    import torch

    saved = torch.load(package.with_suffix(_CONSTANTS), weights_only=True)
    loader: Any
    if package.with_suffix(_CODE).exists():
        from mstar_compile_cache.aoti import CompiledCode

        loader = CompiledCode(package.with_suffix(_CODE))
    else:
        loader = torch._C._aoti.AOTIModelPackageLoader(str(package), "model", False, 1, -1)
    tensors: dict[str, torch.Tensor] = {}
    for name in loader.get_constant_fqns():
        given = saved["constants"].get(name, (weights or {}).get(name))
        found = "missing" if given is None else _layout(given)
        expected = saved["weights"].get(name, found)
        if given is None or found != expected:
            raise StoreError(f"weight {name!r} of {package.name} is {found}, but must be {expected} as compiled")
        tensors[name] = given
    loader.load_constants(tensors, False, True, True)  # active buffer, all of them, pointers only
    return Program(loader, tensors=tensors)


def _layout(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)}, strides {tensor.stride()}, on {tensor.device}"


def _as_module(function: Callable[..., Any]) -> torch.nn.Module:
    import torch

    class Function(torch.nn.Module):
        def forward(self, *args: Any) -> Any:
            return function(*args)

    return Function()
