"""Compiled code fits Windows' limit on paths, whatever the names of the user and of the GPU."""

from pathlib import PureWindowsPath

import pytest

from kohya_ext.compiling.configuration import folder_of_code

pytestmark = pytest.mark.thorough

#: Characters of a path on Windows, without the zero at its end, where long paths are not enabled.
LONGEST = 259

USER = "u" * 20  # as many as a local account can have
CACHE = PureWindowsPath("C:/Users", USER, "AppData/Local/kohya_ext/Cache")
DESCRIPTION = "0a1b2c3d-torch2.14.1+cu130-NVIDIA GeForce RTX 4070 Ti SUPER"


def test_the_longest_path_of_compiled_code_fits_windows(printed_on_gpu):
    own, shortened = printed_on_gpu("compiled_paths.py")
    folder = folder_of_code(CACHE, DESCRIPTION, on_windows=True)
    assert len(str(folder / shortened)) <= LONGEST - 20, "room for longer numbers of processes and kernels"
    assert "native_layer_norm" in own
    assert len(str(folder / own)) > LONGEST, "names of kernels must be shortened, too"


def test_folders_of_other_code_differ():
    folders = {folder_of_code(CACHE, DESCRIPTION + more, on_windows) for more in ("", "2") for on_windows in (True, False)}
    assert len(folders) == 4
