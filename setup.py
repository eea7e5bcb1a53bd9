"""Thin driver: CMake builds and installs, setuptools packs.

Honours TORCH_CUDA_ARCH_LIST, MAX_JOBS and CMAKE_ARGS.
"""

import os
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


def cmake_architectures(text: str) -> str:
    """torch's ``8.0 9.0a;10.0+PTX`` as CMake's ``80-real;90a-real;100``."""
    names = []
    for item in text.replace(";", " ").split():
        number = item.removesuffix("+PTX").replace(".", "")
        names.append(number if item.endswith("+PTX") else f"{number}-real")
    return ";".join(names)


class CMakeBuild(build_ext):
    def run(self) -> None:
        build = ROOT / self.build_temp
        prefix = ROOT / "python" if self.inplace else ROOT / self.build_lib
        options = [
            "-GNinja",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DCMAKE_INSTALL_PREFIX={prefix}",
        ]
        if architectures := os.environ.get("TORCH_CUDA_ARCH_LIST"):
            options.append(f"-DCMAKE_CUDA_ARCHITECTURES={cmake_architectures(architectures)}")
        options += os.environ.get("CMAKE_ARGS", "").split()
        jobs = os.environ.get("MAX_JOBS", str(os.cpu_count() or 1))
        # Fresh: an earlier build's ninja may be gone, and its architectures are not this one's.
        subprocess.check_call(["cmake", "--fresh", "-S", ROOT, "-B", build, *options])
        subprocess.check_call(["cmake", "--build", build, "-j", jobs])
        subprocess.check_call(["cmake", "--install", build])

    def get_outputs(self) -> list[str]:
        return []

    def get_source_files(self) -> list[str]:
        return []


setup(
    packages=["loramux"],
    package_dir={"": "python"},
    package_data={"loramux": ["py.typed", "*.pyi", "_build.json"]},
    ext_modules=[Extension("loramux._ops", [])],  # marks the wheel as platform-specific
    cmdclass={"build_ext": CMakeBuild},
)
