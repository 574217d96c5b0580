"""What a network's dimension means."""

import pytest

from kohya_ext.sdscripts.networks import default_dim, meaning_of_dim


@pytest.mark.parametrize(
    ("module", "arguments", "meaning"),
    [
        ("networks.lora", None, None),
        ("networks.oft", None, "the number of blocks of each layer"),
        ("networks.oft_v2", None, "the size of a block"),
        ("networks.oft_v2", ["coft=true"], "the size of a block"),
        ("networks.oft_v2", ["oft_block_size=16"], "unused"),
        ("networks.boft", ("block_num=8",), "unused"),
        ("lycoris.kohya", ["algo=BOFT"], "the size of a block"),
        ("lycoris.kohya", ["algo=loha"], None),
    ],
)
def test_meaning(module, arguments, meaning):
    assert meaning_of_dim(module, arguments) == meaning


def test_default():
    assert [default_dim(module) for module in ("networks.lora", "networks.oft_v2", "networks.boft", None)] == [4, 32, 4, 4]
