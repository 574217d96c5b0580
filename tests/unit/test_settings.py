import argparse

import pytest

from kohya_ext.config import settings
from kohya_ext.config.settings import Settings
from kohya_ext.errors import UserError


@pytest.mark.parametrize(("text", "value"), [("1", True), ("Yes", True), ("off", False), ("", False), (True, True)])
def test_boolean_words_are_parsed(text, value):
    assert settings.boolean(text) is value


@pytest.mark.parametrize("text", ["2", "maybe", "None"])
def test_other_boolean_words_are_an_error(text):
    with pytest.raises(ValueError, match="must be 1 or 0"):
        settings.boolean(text)


@pytest.mark.parametrize("text", ["1.5", "-0.1", "nan", "half", True, None])
def test_a_budget_is_a_number_from_0_to_1(text):
    with pytest.raises(ValueError, match="from 0 to 1"):
        settings.fraction(text)


def test_a_budget_of_0_enables_patches_without_the_launcher():
    assert settings.fraction("0") == 0.0
    assert settings.switched_on({"SDSCRIPTS_TORCH_COMPILE_ACTIVATION_MEMORY_BUDGET": "0"})


@pytest.mark.parametrize(
    ("environ", "on"),
    [
        ({}, False),
        ({"KOHYA_EXT": "1"}, True),
        ({"KOHYA_EXT": "0", "KOHYA_EXT_PRESET": "16gb"}, False),
        ({"KOHYA_EXT_PRESET": "16gb"}, True),
        ({"SDSCRIPTS_SELECTIVE_TORCH_COMPILE": "1"}, True),
        ({"SDSCRIPTS_SELECTIVE_TORCH_COMPILE": "0"}, False),
        ({"KOHYA_EXT_DISABLE_PATCH": "*"}, False),
        ({"KOHYA_SD_SCRIPTS": "somewhere"}, False),
        ({"KOHYA_EXT": "maybe"}, True),
    ],
)
def test_only_these_options_enable_patches_without_the_launcher(environ, on):
    assert settings.switched_on(environ) is on


def test_an_invalid_variable_is_an_error_with_its_name():
    with pytest.raises(UserError, match="SDSCRIPTS_TORCH_COMPILE_ACTIVATION_MEMORY_BUDGET must be a number from 0 to 1"):
        settings.from_environment({"SDSCRIPTS_TORCH_COMPILE_ACTIVATION_MEMORY_BUDGET": "1.5"})


def test_every_option_has_a_help_text_and_parses_its_own_default():
    for name, option in settings.options():
        assert option.help
        default = Settings()[name]
        if isinstance(default, (bool, tuple)):
            assert option.parse(list(default) if isinstance(default, tuple) else default) == default


def test_flags_accept_underscores_dashes_and_the_no_prefix():
    parser = argparse.ArgumentParser()
    settings.add_to(parser)
    given = parser.parse_args(["--disable-patch", "a,b", "--disable_patch", "c", "--no-selective-torch-compile"])
    assert given.disable_patch == ["a", "b", "c"]
    assert given.selective_torch_compile is False
    assert "strict" not in vars(given)


DEPTH = settings.Option("depth", 3, settings.count, "how deep")


def test_a_patchs_option_is_read_by_row_or_by_name():
    assert Settings()[DEPTH] == 3  # the declared default
    assert (DEPTH.variable, DEPTH.is_switch) == ("KOHYA_EXT_DEPTH", False)
    chosen = Settings(ema=True, strict=True).with_(ema_decay=0.5)
    assert (chosen["ema"], chosen["ema_decay"], chosen["ema_device"]) == (True, 0.5, "cpu")
    assert (chosen.strict, chosen["strict"]) == (True, True)
    assert chosen.values()["ema_decay"] == 0.5
    assert chosen == Settings(strict=True, ema=True, ema_decay=0.5) != Settings()
    with pytest.raises(TypeError, match="no option emma"):
        Settings(emma=True)
    with pytest.raises(KeyError):
        chosen["emma"]
    with pytest.raises(AttributeError):
        chosen.strict = False
