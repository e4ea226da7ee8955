#!/usr/bin/env python3
"""Pack what a GPU host without network lacks into parts small enough to carry there.

Such a host has a Python with torch for CUDA 13 and onnx. This fetches the wheels of TensorRT-RTX, onnxruntime-gpu,
cuda-python, transformers and the libraries that specbuild and specrun need besides, in the versions of constraints.txt,
for x86-64 Linux, and compresses them anew. It needs network and no GPU; the host needs neither network nor anything of
this repository to run ``bash install TARGET_DIR`` beside the parts.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # For what lies beside it.

from scripts.gpu_wheels import slim
from specrun.engine_dir.directories import new_directory
from specrun.errors import SpecError

CONSTRAINTS = Path(__file__).resolve().parent / "constraints.txt"
PLATFORMS = [
    *(f"manylinux_2_{minor}_x86_64" for minor in range(28, 4, -1)),
    *("manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"),
]
"""pip takes a foreign platform literally: it does not know that glibc 2.28 also runs what asks for less."""

GROUPS = {
    "tensorrt_rtx": ["tensorrt-rtx-cu13-libs", "tensorrt-rtx-cu13-bindings"],
    "onnxruntime_gpu": ["onnxruntime-gpu", "flatbuffers", "packaging", "protobuf"],
    "own": [*("cuda-bindings", "cuda-core", "cuda-pathfinder"), *("onnx-ir", "ml-dtypes", "tokenizers", "regex")],
    "libraries": ["onnxscript", "packaging", "pyyaml", "transformers"],
}
"""Fetched without what they depend on: the host's torch and onnx brought that. ``own``: for engines of our own kernels.
"""
WHOLE = {"own": ["click", "pydantic", "pytest", "rich"]}
"""Fetched with what they depend on, which only pip knows: pydantic takes one single version of pydantic-core."""
BUILT = {"tensorrt_rtx": ["tensorrt-rtx-cu13"]}
"""Published as source only: it holds the package tensorrt_rtx, which imports the bindings. (The distribution
tensorrt-rtx holds nothing.)"""
ONLY_IF_MISSING = {"flatbuffers", "ml-dtypes", "packaging", "protobuf", "pyyaml"}
"""Where the host has one, its own packages chose the version."""

MEGABYTE = 10**6
CHUNK = 1 << 20
MAX_PARTS = 1000
"""So that three digits sort."""

INSTALL = r'''#!/usr/bin/env bash
# Joins the wheels that lie here in parts, checks them and installs them into a new directory. Needs no network.
#     bash install TARGET_DIR [PARTS_DIR]     (with PYTHON=/path/to/python for another than python3)
# What python3 lacks is then found by:    eval "$(bash install TARGET_DIR)"
exec "${PYTHON:-python3}" - "$(dirname "$0")" "$@" <<'END'
import hashlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path


def fail(message):
    sys.exit("install: " + message)


def read_manifest(parts):
    try:
        return json.loads((parts / "manifest.json").read_text())
    except FileNotFoundError:
        fail(f"{parts}: missing: manifest.json")
    except ValueError:
        fail(f"{parts}: damaged: manifest.json")


def sha256(path):
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_parts(parts, entries):
    found = {"missing": [], "damaged": []}
    for entry in entries:
        part = parts / entry["name"]
        if not part.exists():
            found["missing"].append(part.name)
        elif part.stat().st_size != entry["size"] or sha256(part) != entry["sha256"]:
            found["damaged"].append(part.name)
    if any(found.values()):
        fail(f"{parts}: " + "; ".join(f"{what}: {', '.join(names)}" for what, names in found.items() if names))


def installed(wheel):
    from importlib import metadata

    try:
        return bool(metadata.version(wheel.split("-")[0]))
    except metadata.PackageNotFoundError:
        return False


def join(parts, manifest, directory):
    """Write the wheels that this Python is to get into ``directory``."""
    position = 0
    for entry in manifest["wheels"]:
        end = position + entry["size"]
        if entry["only_if_missing"] and installed(entry["name"]):
            print(f"left alone: {entry['name']}: this Python has its own", file=sys.stderr)
            position = end
            continue
        wheel = directory / entry["name"]
        with wheel.open("wb") as output:
            while position < end:
                index, offset = divmod(position, manifest["part_bytes"])
                with (parts / manifest["parts"][index]["name"]).open("rb") as part:
                    part.seek(offset)
                    data = part.read(min(1 << 20, end - position))
                if not data:
                    fail(f"{part.name}: shrank while it was read")
                output.write(data)
                position += len(data)
        if sha256(wheel) != entry["sha256"]:
            fail(f"{entry['name']}: damaged")
        yield wheel


def main():
    default_parts, *arguments = sys.argv[1:]
    if len(arguments) not in (1, 2) or arguments[0].startswith("-"):
        fail("usage: bash install TARGET_DIR [PARTS_DIR]")
    target, parts = Path(arguments[0]).absolute(), Path((*arguments, default_parts)[1])
    manifest = read_manifest(parts)
    python = ".".join(map(str, sys.version_info[:2]))
    if python != manifest["python"]:
        wanted = manifest["python"]
        fail(f"packed for Python {wanted}, this is {python}; name another: PYTHON=python{wanted} bash install ...")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        fail(f"{target}: exists; choose another directory, or remove it")
    check_parts(parts, manifest["parts"])
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as work:
        wheels = list(join(parts, manifest, Path(work)))
        command = [sys.executable, "-m", "pip", "--isolated", "--disable-pip-version-check", "install", "--quiet"]
        command += ["--no-index", "--no-deps", "--no-cache-dir", "--root-user-action=ignore"]
        command += ["--target", f"{work}/site", *map(str, wheels)]
        # pip unpacks into TMPDIR first: on the same disk, its second step is a rename.
        if wheels and subprocess.run(command, env={**os.environ, "TMPDIR": work}, stdout=sys.stderr).returncode:
            fail("pip could not install the wheels")
        Path(work, "site").mkdir(exist_ok=True)
        os.replace(f"{work}/site", target)
    print(f"export PYTHONPATH={shlex.quote(str(target))}${{PYTHONPATH:+:$PYTHONPATH}}")


try:
    main()
except OSError as error:
    fail(str(error))
END
'''


def pip(*arguments: str | Path) -> None:
    """Run pip, which says itself what it cannot find."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    if subprocess.run(command, stdout=sys.stderr).returncode:
        raise click.ClickException("pip could not fetch the wheels")


def pinned(name: str) -> str:
    """``name`` in the version of the package that the project is tested with in its place; others by --constraint."""
    tested = {"onnxruntime-gpu": "onnxruntime", "cuda-bindings": "cuda-python"}.get(name)
    if tested is None:
        return name
    version = re.search(rf"^{tested}==(\S+)$", CONSTRAINTS.read_text(), re.MULTILINE)
    if version is None:
        raise click.ClickException(f"{CONSTRAINTS}: has no {tested}")
    return f"{name}=={version[1]}"


def fetch(group: str, python: str, wheels: Path) -> None:
    """Put the wheels of ``group`` into ``wheels``. Without pip's cache, which would keep a second copy."""
    common: list[str | Path] = ["--no-cache-dir", "--constraint", CONSTRAINTS]
    platforms = [f"--platform={platform}" for platform in PLATFORMS]
    download = ["download", *common, "--only-binary=:all:", "--python-version", python, *platforms, "--dest", wheels]
    pip(*download, "--no-deps", *map(pinned, GROUPS[group]))
    if group in WHOLE:
        pip(*download, *WHOLE[group])
    if group in BUILT:
        pip("wheel", *common, "--no-deps", "--wheel-dir", wheels, *BUILT[group])


def distribution(wheel: Path) -> str:
    """``ml_dtypes-0.6.0-cp312-...whl`` -> ``ml-dtypes``."""
    return re.sub(r"[-_.]+", "-", wheel.name.split("-")[0]).lower()


def split(wheels: list[Path], output: Path, part_bytes: int, python: str, consume: bool) -> int:
    """Write the wheels end to end into parts, and the manifest; returns how many parts there are.

    ``consume`` removes each wheel as soon as it is in the parts.
    """
    parts: list[hashlib._Hash] = []
    entries = []
    position = 0
    for wheel in wheels:
        size, digest = wheel.stat().st_size, hashlib.sha256()
        with wheel.open("rb") as source:
            while data := source.read(min(CHUNK, part_bytes - position % part_bytes)):
                if position % part_bytes == 0:
                    parts.append(hashlib.sha256())
                with (output / f"part-{len(parts) - 1:03d}").open("ab") as part:
                    part.write(data)
                parts[-1].update(data)
                digest.update(data)
                position += len(data)
        only_if_missing = distribution(wheel) in ONLY_IF_MISSING
        entries.append(
            {"name": wheel.name, "size": size, "sha256": digest.hexdigest(), "only_if_missing": only_if_missing}
        )
        if consume:
            wheel.unlink()
    manifest = {
        "python": python,
        "part_bytes": part_bytes,
        "wheels": entries,
        "parts": [
            {
                "name": f"part-{index:03d}",
                "size": min(part_bytes, position - index * part_bytes),
                "sha256": part.hexdigest(),
            }
            for index, part in enumerate(parts)
        ],
    }
    (output / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    return len(parts)


def size_of(wheels: Path) -> int:
    """Bytes."""
    return sum(wheel.stat().st_size for wheel in wheels.glob("*.whl"))


def pack(
    output: Path, python: str, part_bytes: int, groups: tuple[str, ...], given: Path | None, architecture: int | None
) -> None:
    """Write the parts, the manifest and ``install`` into ``output``, which appears when all is there.

    architecture: with kernels for this kind of GPU alone, such as 90.
    """
    with new_directory(output, force=False) as work:
        source = given or work / "wheels"
        if given is None:
            for group in groups:
                before = size_of(source)
                fetch(group, python, source)
                click.echo(f"{group}: {(size_of(source) - before) / MEGABYTE:.1f} MB", err=True)
            for wheel in source.glob("*.whl"):
                slim(wheel, architecture)
        wheels, size = sorted(source.glob("*.whl")), size_of(source)
        if not wheels:
            raise click.ClickException(f"{source}: has no wheels")
        if size > part_bytes * MAX_PARTS:
            raise click.UsageError(f"--part_mb: {size / MEGABYTE:.1f} MB would be more than {MAX_PARTS} parts")
        count = split(wheels, work, part_bytes, python, consume=given is None)
        if given is None:
            shutil.rmtree(source)
        (work / "install").write_text(INSTALL)
        (work / "install").chmod(0o755)
    click.echo(f"{output}: {len(wheels)} wheels, {size / MEGABYTE:.1f} MB in {count} parts", err=True)
    click.echo(f"on the host, with all of it in one folder: bash {output.name}/install TARGET_DIR", err=True)


@click.command(context_settings={"token_normalize_func": lambda name: name.replace("-", "_")})
@click.argument("output_dir", type=click.Path(path_type=Path))
@click.option("--python", default="3.12", show_default=True, help="The host's Python.")
@click.option("--part_mb", type=click.FloatRange(0.001), default=60, show_default=True, help="Largest part, in 10^6 B.")
@click.option("--compute_capability", metavar="X.Y", help="Of the host's GPU: leave out the kernels for others.")
@click.option("--only", multiple=True, type=click.Choice([*GROUPS]), help="Only this group; may be repeated.")
@click.option(
    "--wheels",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Pack the wheels in this directory and fetch none.",
)
def main(
    output_dir: Path,
    python: str,
    part_mb: float,
    compute_capability: str | None,
    only: tuple[str, ...],
    wheels: Path | None,
) -> None:
    """Pack what a GPU host without network lacks into OUTPUT_DIR, in parts small enough to carry there."""
    if compute_capability and re.fullmatch(r"\d{1,2}\.\d", compute_capability) is None:
        raise click.UsageError(f"--compute_capability {compute_capability}: give two numbers, such as 9.0")
    architecture = int(compute_capability.replace(".", "")) if compute_capability else None
    if re.fullmatch(r"3\.(1[1-9]|[2-9]\d)", python) is None:
        raise click.UsageError(f"--python {python}: give 3.11 or newer, such as 3.12")
    if only and wheels:
        raise click.UsageError("give either --only or --wheels")
    if output_dir.exists() and (not output_dir.is_dir() or any(output_dir.iterdir())):
        raise click.UsageError(f"{output_dir}: exists; choose another directory, or remove it")
    try:
        pack(output_dir, python, round(part_mb * MEGABYTE), only or tuple(GROUPS), wheels, architecture)
    except (SpecError, OSError) as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    main()
