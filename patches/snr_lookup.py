"""Look up a batch's signal-to-noise ratios in one gather, without waiting for the GPU.

``--min_snr_gamma``, ``--debiased_estimation_loss`` and the v-prediction scales index a table on the GPU with each timestep in
turn. Each time the CPU waits until all of forward has been computed, when it should be handing out backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from types import SimpleNamespace
from typing import Any

from kohya_ext.config.settings import Settings
from kohya_ext.patching.patch import Patch, Target, takes
from kohya_ext.sdscripts.fingerprints import known_bodies

_gathers = 0
"""Batches whose ratios were looked up."""


def _facts() -> Mapping[str, object]:
    return {"gathers": _gathers}


def _gathered(place: int) -> Callable[[Any, Settings], Any]:
    """For a function whose parameters number ``place`` and ``place + 1`` are the timesteps and the scheduler with the table."""

    def replace(original: Any, settings: Settings) -> Any:
        @wraps(original)
        def look_up(*args: Any, **kwargs: Any) -> Any:
            global _gathers
            if len(args) < place + 2:
                return original(*args, **kwargs)
            _gathers += 1
            timesteps, scheduler = args[place : place + 2]
            # The function stacks all_snr[t] for each t: it gets the batch's own ratios, and their places.
            found = SimpleNamespace(all_snr=scheduler.all_snr[timesteps])
            return original(*args[:place], range(len(timesteps)), found, *args[place + 2 :], **kwargs)

        return look_up

    return replace


PATCH = Patch(
    name="snr_lookup",
    summary="loss weights by signal-to-noise ratio no longer wait for the GPU",
    targets=tuple(
        # The originals run, but timesteps and scheduler answer only the look-up that these bodies do.
        Target(
            "library.custom_train_functions", name, _gathered(names.index("timesteps")), takes(*names), body=known_bodies(body)
        )
        for name, body, names in (
            ("apply_snr_weight", "ca4264aabf3d", ("loss", "timesteps", "noise_scheduler", "gamma")),
            ("get_snr_scale", "d259d6de2b64", ("timesteps", "noise_scheduler")),
            ("apply_debiased_estimation", "923bd20e461f", ("loss", "timesteps", "noise_scheduler")),
        )
    ),
    exactness="exact",
    held_to="the same weights, bit for bit",
    idea="https://github.com/kohya-ss/sd-scripts/blob/main/library/custom_train_functions.py",
    facts=_facts,
)
