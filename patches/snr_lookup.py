"""Look up a batch's signal-to-noise ratios in one gather, without waiting for the GPU.

``--min_snr_gamma``, ``--debiased_estimation_loss`` and the v-prediction scales index a table on the GPU with one timestep at a
time. Each lookup makes the CPU wait for the whole forward pass, which delays the launch of backward.
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
"""Number of batches whose ratios were gathered."""


def _facts() -> Mapping[str, object]:
    return {"gathers": _gathers}


def _gather(position: int) -> Callable[[Any, Settings], Any]:
    """Return a replacement for a function with timesteps and scheduler at ``position`` and ``position + 1``."""

    def replace(original: Any, settings: Settings) -> Any:
        @wraps(original)
        def lookup(*args: Any, **kwargs: Any) -> Any:
            global _gathers
            if len(args) < position + 2:
                return original(*args, **kwargs)
            _gathers += 1
            timesteps, scheduler = args[position : position + 2]
            # The function stacks all_snr[t] for each t, so it gets the ratios of the batch and their indices.
            table = SimpleNamespace(all_snr=scheduler.all_snr[timesteps])
            return original(*args[:position], range(len(timesteps)), table, *args[position + 2 :], **kwargs)

        return lookup

    return replace


PATCH = Patch(
    name="snr_lookup",
    summary="compute loss weights from signal-to-noise ratios without waiting for the GPU",
    targets=tuple(
        # The originals run with replaced timesteps and scheduler, which support only the lookup in these bodies.
        Target(
            "library.custom_train_functions", name, _gather(names.index("timesteps")), takes(*names), body=known_bodies(bodies)
        )
        for name, bodies, names in (
            ("apply_snr_weight", {"ca4264aabf3d": "since 2024-10"}, ("loss", "timesteps", "noise_scheduler", "gamma")),
            ("get_snr_scale", {"d259d6de2b64": "since 2024-10"}, ("timesteps", "noise_scheduler")),
            (
                "apply_debiased_estimation",
                {"5c6b882c5975": "2024-10", "923bd20e461f": "since 2024-12"},
                ("loss", "timesteps", "noise_scheduler"),
            ),
        )
    ),
    exactness="exact",
    held_to="the same loss weights, bit-identical",
    idea="https://github.com/kohya-ss/sd-scripts/blob/main/library/custom_train_functions.py",
    facts=_facts,
)
