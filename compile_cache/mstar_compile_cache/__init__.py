"""Compiled artifacts that persist across processes; knows torch, not mstar.

`key` says what invalidates an artifact, `store` keeps artifacts by key, `archive` carries them elsewhere, `warm`
compiles into them.
"""

from mstar_compile_cache.archive import export_archive, import_archive
from mstar_compile_cache.entry import Entry, StoreError
from mstar_compile_cache.key import CacheKey, Machine, canonical, current_machine, digest_of, source_hash
from mstar_compile_cache.store import DEFAULT_MAX_BYTES, BuildTimeout, Counters, Store
from mstar_compile_cache.warm import Program, aot_compile, aot_load, inductor_environment

__version__ = "0.1.0"

__all__ = [
    "DEFAULT_MAX_BYTES", "BuildTimeout", "CacheKey", "Counters", "Entry", "Machine", "Program", "Store", "StoreError",
    "aot_compile", "aot_load", "canonical", "current_machine", "digest_of", "export_archive", "import_archive",
    "inductor_environment", "source_hash",
]  # fmt: skip
