"""Stand-ins for the CUDA libraries that torch's default build is linked with. FOR TESTS ON MACHINES WITHOUT A GPU ONLY.

torch_xla fits that build of torch and no other. Its CUDA libraries are gigabytes. Without a GPU none of them is ever
called, but the loader wants them to be there. What is written here has every symbol that torch's libraries ask for,
each of them a function that says "failed", so that torch finds no GPU.

Usage: ``python cuda_stubs.py SITE_PACKAGES FOLDER``, then ``LD_LIBRARY_PATH=FOLDER``. Needs ``readelf`` and ``gcc``.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

CUDA = re.compile(r"lib(cu|nv|nccl)")
FAILED = 100
"""``cudaErrorNoDevice``: torch goes on without a GPU, and says nothing."""


def wanted(libraries: Iterable[Path]) -> dict[str, dict[str, set[str]]]:
    """Missing libraries, and the symbols asked of each, by symbol version (``""`` for those without)."""
    paths = list(libraries)
    there = {path.name for path in paths}
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    unversioned: set[str] = set()
    for path in paths:
        for name in re.findall(r"\(NEEDED\).*\[(.+?)\]", _readelf("-d", path)):
            if CUDA.match(name) and name not in there:
                found[name]  # it must be there, though nothing may be asked of it
        owners = _version_owners(path)
        for symbol in re.findall(r"\sUND (\S+)", _readelf("--dyn-syms", path)):
            name, _, version = symbol.partition("@")
            if owners.get(version) in found:
                found[owners[version]][version].add(name)
            elif not version and re.match(r"_?(cu|nv|nccl)", name):
                unversioned.add(name)
    if found:
        # Whose they are is not written down; the loader looks in all libraries, so one of them will do.
        found[sorted(found)[0]][""] |= unversioned
    return found


def _version_owners(path: Path) -> dict[str, str]:
    """From which library each symbol version comes."""
    owners, library = {}, ""
    for line in _readelf("-V", path).splitlines():
        if file := re.search(r"File: (\S+)", line):
            library = file[1]
        elif (name := re.search(r"Name: (\S+)\s+Flags", line)) and library:
            owners[name[1]] = library
    return owners


def _readelf(option: str, path: Path) -> str:
    return subprocess.run(["readelf", "-W", option, path], capture_output=True, text=True, check=True).stdout


def build(name: str, versions: Mapping[str, set[str]], folder: Path) -> None:
    """Compile one library."""
    symbols = sorted(set().union(*versions.values()))
    source, script = folder / f"{name}.c", folder / f"{name}.map"
    source.write_text("".join(f"int {symbol}(void) {{ return {FAILED}; }}\n" for symbol in symbols) or "int none;\n")
    script.write_text(
        "".join(
            f"{version} {{ global: {'; '.join(sorted(names))}; }};\n" for version, names in versions.items() if version
        )
    )
    command = ["gcc", "-shared", "-fPIC", "-w", "-fno-builtin", f"-Wl,-soname,{name}", "-o", folder / name, source]
    if script.stat().st_size:
        command.append(f"-Wl,--version-script={script}")
    subprocess.run(command, check=True)


def main(site_packages: str, target: str) -> None:
    """Write the stand-ins into a folder."""
    folder = Path(target)
    folder.mkdir(parents=True, exist_ok=True)
    found = wanted(sorted((Path(site_packages) / "torch" / "lib").glob("*.so*")))
    for name, versions in found.items():
        build(name, versions, folder)
    print(f"{len(found)} stand-ins for CUDA libraries in {folder}")


if __name__ == "__main__":
    main(*sys.argv[1:])
