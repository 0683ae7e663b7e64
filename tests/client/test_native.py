"""Kernels are loaded from memory: each its own, once, without a file, and a bad one is an error."""

from __future__ import annotations

import os
import subprocess
import sysconfig
from pathlib import Path

import pytest
import torch

from fuse_cache.client import native

# What Inductor's bindings look like from outside: a module of the same name in every library.
SOURCE = """
#include <Python.h>
static PyObject* answer(PyObject*, PyObject*) { return PyLong_FromLong(ANSWER); }
static PyMethodDef methods[] = {{"kernel", answer, METH_VARARGS, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "kernel", nullptr, -1, methods};
PyMODINIT_FUNC PyInit_kernel() { return PyModule_Create(&definition); }
"""


def library(folder: Path, answer: int) -> bytes:
    source, target = folder / "kernel.cpp", folder / "kernel.so"
    source.write_text(SOURCE.replace("ANSWER", str(answer)))
    include = sysconfig.get_path("include")
    command = ["g++", "-shared", "-fPIC", f"-I{include}", "-s", "-o", str(target), str(source)]
    subprocess.run(command, check=True)
    return target.read_bytes()


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    folder = tmp_path_factory.mktemp("libraries")
    return [library(folder, answer) for answer in range(3)]


def test_each_library_is_itself_though_all_modules_have_one_name(libraries: list[bytes]) -> None:
    # The descriptor numbers come again, and dlopen and Python both remember by name.
    kernels = [native.kernel(native.library_digest(data), data) for data in libraries]
    assert [kernel() for kernel in kernels] == [0, 1, 2]


def test_a_library_is_loaded_once_per_digest(libraries: list[bytes]) -> None:
    digest = native.library_digest(libraries[0])
    assert native.kernel(digest, libraries[0]) is native.kernel(digest, libraries[0])


def test_a_library_under_anothers_digest_is_refused_and_does_not_take_its_place(tmp_path: Path) -> None:
    right, wrong = library(tmp_path, 10), library(tmp_path, 11)
    digest = native.library_digest(right)
    with pytest.raises(native.NativeLoadError, match="does not fit its digest"):
        native.kernel(digest, wrong)
    assert native.kernel(digest, right)() == 10


def test_loading_leaves_no_descriptor_open_and_no_file(
    libraries: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    before = len(os.listdir("/proc/self/fd"))
    native._load(libraries[1])
    assert len(os.listdir("/proc/self/fd")) == before
    assert list(tmp_path.iterdir()) == []


def test_without_memory_files_a_temporary_file_serves(
    libraries: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> int:
        raise OSError(38, "not implemented")

    monkeypatch.setattr(os, "memfd_create", refuse)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert native._load(libraries[2])() == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("data", [b"", b"\x7fELF", b"not a library"])
def test_what_is_no_library_is_an_error(data: bytes) -> None:
    with pytest.raises(native.NativeLoadError, match="cannot be loaded"):
        native.kernel(native.library_digest(data), data)


def test_a_library_without_a_kernel_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty.cpp").write_text("int nothing() { return 0; }")
    target = tmp_path / "empty.so"
    subprocess.run(["g++", "-shared", "-fPIC", "-o", str(target), str(tmp_path / "empty.cpp")], check=True)
    with pytest.raises(native.NativeLoadError, match="PyInit_kernel"):
        native.kernel(native.library_digest(target.read_bytes()), target.read_bytes())


def test_library_calls_are_torchs_own_and_rare_ones_are_asked_of_inductor() -> None:
    assert native.EXTERN_KERNELS.mm is torch.mm
    assert callable(native.EXTERN_KERNELS.convolution)
    with pytest.raises(AttributeError):
        native.EXTERN_KERNELS.no_such_kernel  # noqa: B018  # the access is the test
