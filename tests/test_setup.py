"""The build of the CPU's kernels (setup.py), with a stand-in for the compiler: what is installed when it works,
and when it does not.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NATIVE = Path("offload/native")
SETS = {"x86_64": ("avx2", "avx512", "avx512_bf16", "amx"), "aarch64": ("neon",)}
NAMES = {f"{name}.so" for name in SETS.get(platform.machine(), ())}
WORKS = "import sys; open(sys.argv[-1], 'w').write(' '.join(sys.argv))"
FAILS = "import sys; sys.exit('2 warnings\\nkernels.cpp:1:2: error: no such thing\\n1 error generated.')"

pytestmark = pytest.mark.skipif(sys.platform != "linux" or not NAMES, reason="no kernels are built for this platform")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """As much of the repository as the build of the kernels needs, without anything built."""
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / NATIVE, tmp_path / NATIVE, ignore=shutil.ignore_patterns("*.so", "unbuilt.txt"))
    (tmp_path / "triforce_cli").mkdir()
    (tmp_path / "triforce_cli" / "__init__.py").write_text('__version__ = "0"\n')
    return tmp_path


def build(source: Path, compiler: str, *arguments: str) -> str:
    """Run `setup.py build_ext` with a `ziglang` that does this; what it prints. It always succeeds."""
    (source / "ziglang").mkdir(exist_ok=True)
    (source / "ziglang" / "__init__.py").touch()  # else an installed one is found first
    (source / "ziglang" / "__main__.py").write_text(compiler)
    command = [sys.executable, "setup.py", "build_ext", *arguments]
    variables = os.environ | {"PYTHONPATH": str(source)}
    done = subprocess.run(command, cwd=source, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def made(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.suffix in (".so", ".txt")}


def test_every_instruction_set_has_a_library_beside_the_source_of_an_editable_package(source: Path) -> None:
    build(source, WORKS, "--inplace")
    assert made(source / NATIVE) == NAMES


def test_a_wheels_libraries_are_not_beside_the_source(source: Path) -> None:
    build(source, WORKS, "--build-lib", "out")
    assert made(source / "out" / NATIVE) == NAMES
    assert made(source / NATIVE) == set()


def test_a_library_is_of_its_instruction_set_and_rounds_as_written(source: Path) -> None:
    build(source, WORKS, "--inplace")
    commands = {name: (source / NATIVE / name).read_text().split() for name in NAMES}
    assert len({next(word for word in words if word.startswith("-mcpu=")) for words in commands.values()}) == len(NAMES)
    for words in commands.values():
        assert {"c++", "-ffp-contract=off", "kernels.cpp"} <= set(words)
        assert not {"-ffast-math", "-Ofast", "-march=native", "-mcpu=native"} & set(words)


@pytest.mark.few(1)
@pytest.mark.parametrize("arguments", [("--inplace",), ("--build-lib", "out")])
def test_a_compiler_that_fails_leaves_the_reason_and_no_older_library(source: Path, arguments: tuple[str, ...]) -> None:
    folder = source / NATIVE if arguments == ("--inplace",) else source / "out" / NATIVE
    build(source, WORKS, *arguments)
    said = build(source, FAILS, *arguments)
    assert "the CPU's kernels were not built, torch's operators will run instead: kernels.cpp:1:2: error:" in said
    assert made(folder) == {"unbuilt.txt"}
    assert (folder / "unbuilt.txt").read_text() == "kernels.cpp:1:2: error: no such thing\n"
    build(source, WORKS, *arguments)
    assert made(folder) == NAMES


def test_a_compiler_that_fails_for_one_instruction_set_leaves_the_others(source: Path) -> None:
    if len(NAMES) == 1:
        pytest.skip("this platform has one instruction set")
    build(source, f"import sys\nif sys.argv[-1].endswith('avx512.so'):\n    {FAILS}\n{WORKS}", "--inplace")
    assert made(source / NATIVE) == NAMES - {"avx512.so"} | {"unbuilt.txt"}


def test_without_a_word_from_the_compiler_its_status_is_the_reason(source: Path) -> None:
    build(source, "import os; os._exit(7)", "--inplace")
    assert (source / NATIVE / "unbuilt.txt").read_text() == "the compiler ended with status 7\n"
