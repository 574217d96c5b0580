"""``python -m virtual_gpu 4090 --memory 16GiB --gpus 2 -- python train.py``: run a command on virtual GPUs."""

from __future__ import annotations

import argparse
import os
import sys

from virtual_gpu import build


def main() -> None:
    """Replace this process by the command."""
    arguments, command = sys.argv[1:], []
    if "--" in arguments:
        at = arguments.index("--")
        arguments, command = arguments[:at], arguments[at + 1 :]
    parser = argparse.ArgumentParser(prog="python -m virtual_gpu", usage="%(prog)s CARD [options] -- COMMAND ...")
    parser.add_argument("card", help="3060, 3080, 3090, 4060, 4060ti, 4070, 4080, 4090, a100 or h100")
    parser.add_argument("--memory", metavar="SIZE", help="total memory of each GPU, for example 16GiB")
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="number of GPUs, up to 16; default 1")
    parser.add_argument("--json", metavar="FILE", help="write the counters to FILE when the command ends")
    parsed = parser.parse_args(arguments)
    if not command:
        parser.error("no command given; add it after --")
    settings = {"VIRTUAL_GPU": parsed.card, "VIRTUAL_GPU_COUNT": str(parsed.gpus)}
    if parsed.memory:
        settings["VIRTUAL_GPU_MEMORY"] = parsed.memory
    if parsed.json:
        settings["VIRTUAL_GPU_JSON"] = os.path.abspath(parsed.json)
    try:
        folder = build.library_folder()
    except build.BuildError as error:
        sys.exit(f"virtual_gpu: {error}")
    sys.stdout.flush()
    os.execvpe(command[0], command, build.environment(folder, settings, os.environ))


if __name__ == "__main__":
    main()
