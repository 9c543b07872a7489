#!/usr/bin/env bash
# Makes or refreshes .venv: `scripts/environment.sh test` with everything the checks need, `... demo` with what
# serving one model needs. Does nothing when the stamp of the last install is newer than what it was made from.
set -euo pipefail
cd "$(dirname "$0")/.."

purpose=$1
venv=.venv
say() { printf '\n== %s\n' "$*"; }

case $purpose in
    test)
        projects=(".[test]")
        for folder in plugins/*/ tests/echo_plugin/; do
            [ -f "${folder}pyproject.toml" ] && projects+=("./${folder%/}")
        done
        stamps=("$venv/.installed-test")
        ;;
    demo)
        projects=("." "./plugins/orpheus")
        stamps=("$venv/.installed-demo" "$venv/.installed-test")
        ;;
    *)
        echo "usage: $0 test|demo" >&2
        exit 2
        ;;
esac

sources=(pyproject.toml requirements/constraints.txt plugins/*/pyproject.toml tests/echo_plugin/pyproject.toml)
for stamp in "${stamps[@]}"; do
    [ -f "$stamp" ] || continue
    current=yes
    for source in "${sources[@]}"; do
        [ "$stamp" -nt "$source" ] || current=no
    done
    if [ $current = yes ] && "$venv/bin/python" -c '' 2>/dev/null; then
        say "using the environment in $venv"
        exit 0
    fi
done

python=${PY:-}
if [ -z "$python" ]; then
    for candidate in python3.11 python3; do
        if "$candidate" -c '' 2>/dev/null; then
            python=$candidate
            break
        fi
    done
fi
if ! "${python:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "mstar needs Python 3.11 or newer; install one, or name it: make PY=/path/to/python $purpose" >&2
    exit 1
fi

if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    say "making an environment in $venv with $("$python" --version)"
    "$python" -m venv "$venv"
fi
rm -f "$venv"/.installed-*
say "installing ${projects[*]} (the first time this downloads PyTorch, which takes minutes)"
pip=("$venv/bin/python" -m pip --disable-pip-version-check --quiet install --no-input -c requirements/constraints.txt)
"${pip[@]}" hatchling editables
editables=()
for project in "${projects[@]}"; do editables+=(-e "$project"); done
"${pip[@]}" --no-build-isolation "${editables[@]}"
touch "${stamps[0]}"
