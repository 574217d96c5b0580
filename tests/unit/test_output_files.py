"""Files of a run by their names."""

import pytest

from kohya_ext.run import atomic_write, output_files

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


def test_names_that_differ_in_case_are_compared_as_the_file_system_does(tmp_path):
    (tmp_path / "a").touch()
    is_same = (tmp_path / "A").exists()
    for file in ("Cat-STATE", "Cat-rolling00000003-state.previous"):
        (tmp_path / file).mkdir()
    for file in ("Cat.safetensors", "CAT-000001.SafeTensors", "Cat.safetensors.1a-2-3.partial"):
        (tmp_path / file).touch()
    listed = {
        *output_files.states(tmp_path, "cat"),
        *output_files.previous_states(tmp_path, "cat"),
        *output_files.models(tmp_path, "cat"),
        *output_files.temporary_paths(tmp_path, "cat", ".partial"),
    }
    names = ("cat-state", "cat-rolling00000003-state.previous", "cat.safetensors", "cat-000001.safetensors")
    expected = (*names, "cat.safetensors.1a-2-3.partial")
    assert {str(path) for path in listed} == ({str(tmp_path / name) for name in expected} if is_same else set())


@pytest.mark.parametrize("first", ["Cat", "cat"])
def test_a_model_whose_name_differs_in_case_is_kept_where_it_is_the_same_file(tmp_path, first):
    (tmp_path / f"{first}.safetensors").write_text("first")
    for model in output_files.models(tmp_path, "cat"):
        atomic_write.preserve(model)
    final = tmp_path / "cat.safetensors"
    atomic_write.write_atomically(final, lambda path: path.write_text("second"), lambda: 6)
    assert {path.read_text() for path in tmp_path.iterdir()} == {"first", "second"}
