"""Builds the simulated chip's library. A vendor's plugin is pure Python: delete this file together with torch_acme."""

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

SOURCES = ("autocast", "collectives", "device", "kernels", "module")

setup(
    ext_modules=[
        CppExtension(
            "torch_acme._C",
            [f"src/torch_acme/csrc/{name}.cpp" for name in SOURCES],
            extra_compile_args=["-O0", "-g0"],  # the kernels are torch's own: nothing here is worth optimizing
        )
    ],
    cmdclass={"build_ext": BuildExtension},
)
