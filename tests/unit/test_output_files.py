"""Files of a run by their names."""

import pytest

from kohya_ext.run import output_files

NAMES = ("tabby-rolling00000003-state", "tabby-000001-state", "tabby-state.previous", "tabby.safetensors", "tabby-ema.ckpt")


@pytest.mark.parametrize("name", ["tabby", "cats/tabby"])
def test_files_are_found_in_the_folder_of_the_name(name, tmp_path):
    folder = (tmp_path / name).parent
    folder.mkdir(exist_ok=True)
    for file in (*NAMES, "tabby-2.safetensors", "other-state"):
        (folder / file).mkdir() if "state" in file else (folder / file).touch()
    (folder / "tabby.safetensors.1a-2-3.partial").touch()
    assert {path.name for path in output_files.states(tmp_path, name)} == set(NAMES[:2])
    assert [path.name for path in output_files.previous_states(tmp_path, name)] == [NAMES[2]]
    assert {path.name for path in output_files.final_models(tmp_path, name)} == set(NAMES[3:])
    best = ("tabby-best-step00000003-ema.safetensors", "tabby-best-step00000003.safetensors.1a-2-3.partial")
    for file in best:
        (folder / file).touch()
    assert {path.name for path in output_files.models(tmp_path, name)} == {*NAMES[3:], best[0]}
    assert len(output_files.temporary_paths(tmp_path, name, ".partial")) == 2
    assert output_files.rolling_state(tmp_path, name, 3) in output_files.states(tmp_path, name)


def test_a_folder_that_does_not_exist_has_no_files(tmp_path):
    assert list(output_files.models(tmp_path, "cats/tabby")) == []
    assert output_files.temporary_paths(tmp_path, "cats/tabby", ".partial") == []
