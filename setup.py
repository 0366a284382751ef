"""The build of the CPU's kernels: offload/native/kernels.cpp becomes a shared library for each
instruction set, beside its source in an editable installation. The rest about the package is in pyproject.toml.

The compiler is zig's clang, which the wheel `ziglang` brings along. Without it, on another platform, or where it
fails, the package is installed without the kernels and runs on torch's operators; unbuilt.txt has the reason.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

SOURCES = Path("offload/native")  # relative, as setuptools wants it
REASON = "unbuilt.txt"
FLAGS = (
    *("-std=c++20", "-O3", "-ffp-contract=off", "-fno-math-errno"),  # sums are added as they are written
    *("-fno-exceptions", "-fno-rtti", "-nostdlib++", "-fno-sanitize=all"),  # no runtime of C++
    *("-shared", "-fPIC", "-fvisibility=hidden", "-s", "-Wall", "-Wextra", "-Wno-psabi"),
)
OLDEST_GLIBC = "2.17"
CPU_FLAGS = {
    "x86_64": {
        "avx2": ("-mcpu=x86_64_v3",),
        "avx512_bf16": ("-mcpu=x86_64_v4+avx512vnni+avx512bf16", "-mprefer-vector-width=512"),
        "avx512": ("-mcpu=x86_64_v4", "-mprefer-vector-width=512"),
        "amx": ("-mcpu=x86_64_v4+amx_tile+amx_bf16+avx512vnni+avx512bf16", "-mprefer-vector-width=512"),
    },
    "aarch64": {"neon": ("-mcpu=generic",)},
}


class BuildKernels(build_ext):
    """Compiles kernels.cpp for every instruction set, all at once. What an earlier build left is removed first."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = self.parallel or True  # as many as there are CPUs

    def get_ext_filename(self, fullname: str) -> str:
        """A library for ctypes has no Python version in its name."""
        return os.path.join(*fullname.split(".")) + ".so"

    def run(self) -> None:
        built = Path(self.build_lib) / SOURCES
        self.folder = SOURCES if self.editable_mode or self.inplace else built  # of the package that will be imported
        for folder in {self.folder, built}:
            folder.mkdir(parents=True, exist_ok=True)
            for old in (*folder.glob("*.so"), folder / REASON):
                old.unlink(missing_ok=True)
        super().run()

    def build_extension(self, ext: Extension) -> None:
        if reason := compile_kernels(Path(self.get_ext_fullpath(ext.name)).absolute()):
            (self.folder / REASON).write_text(reason + "\n", encoding="utf-8")
            raise CompileError(f"the CPU's kernels were not built, torch's operators will run instead: {reason}")


class PlatformWheel(bdist_wheel):
    """The libraries are of one platform, but of no version of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        tag = super().get_tag()
        return tag if self.root_is_pure else ("py3", "none", tag[2])


def compile_kernels(library: Path) -> str:
    """Compile for the instruction set that `library` is named after. Why it failed, or ""."""
    machine = platform.machine()
    target = f"-target {machine}-linux-gnu.{OLDEST_GLIBC}".split()
    command = [sys.executable, "-m", "ziglang", "c++", *target, *FLAGS, *CPU_FLAGS[machine][library.stem]]
    with tempfile.TemporaryDirectory() as cache:
        places = {"ZIG_GLOBAL_CACHE_DIR": cache, "ZIG_LOCAL_CACHE_DIR": cache}
        done = subprocess.run(
            [*command, "kernels.cpp", "-o", str(library)],
            cwd=SOURCES,
            env=os.environ | places,
            capture_output=True,
            text=True,
            errors="replace",
        )
    print(done.stderr, end="", file=sys.stderr)
    if done.returncode == 0:
        return ""
    lines = done.stderr.splitlines() or [f"the compiler ended with status {done.returncode}"]
    return next((line for line in lines if "error:" in line), lines[-1]).strip()


def kernels() -> list[Extension]:
    """A library for each instruction set of this platform; none where the kernels cannot run."""
    names = CPU_FLAGS.get(platform.machine(), {}) if sys.platform == "linux" else {}
    package, source = ".".join(SOURCES.parts), str(SOURCES / "kernels.cpp")
    headers = sorted(str(path) for path in SOURCES.glob("*.h"))
    return [Extension(f"{package}.{name}", [source], depends=headers, optional=True) for name in names]


setup(ext_modules=kernels(), cmdclass={"build_ext": BuildKernels, "bdist_wheel": PlatformWheel})
