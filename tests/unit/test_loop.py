"""What a patch reads of the training loop stays the loop's own."""

import weakref

from kohya_ext.loop import current_batch


class Loss:
    """Stands for a tensor that a step leaves to the next."""


def test_reading_the_batch_keeps_no_other_variable_alive():
    def train():
        batch, loss = {"images": 1}, Loss()
        first = weakref.ref(loss)
        assert current_batch() is batch
        loss = Loss()
        return first(), loss

    assert train()[0] is None


def test_reading_the_batch_leaves_the_variables_of_a_module_alone():
    variables = {"current_batch": current_batch, "batch": {"images": 1}}
    exec("found = current_batch()", variables)
    assert variables["found"] is variables["batch"]
