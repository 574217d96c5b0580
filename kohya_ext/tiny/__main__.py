"""Entry point of `python -m kohya_ext.tiny FAMILY CHECKOUT FOLDER`, which `checkpoints.write` runs."""

import argparse
from pathlib import Path

from kohya_ext.tiny import checkpoints, tokenizers, weights


def main() -> None:
    """Write the models and tokenizers of a family."""
    parser = argparse.ArgumentParser(prog="python -m kohya_ext.tiny", description="Write tiny models and tokenizers.")
    parser.add_argument("family", choices=checkpoints.FAMILIES)
    parser.add_argument("checkout", type=Path, help="a checkout of kohya-ss/sd-scripts")
    parser.add_argument("folder", type=Path, help="output folder; created if missing")
    arguments = parser.parse_args()
    models = checkpoints.locate(arguments.family, arguments.folder)
    tokenizers.write(models.tokenizers)
    for path in models.files.values():
        path.parent.mkdir(parents=True, exist_ok=True)
    weights.write(arguments.family, arguments.checkout.resolve(), models.files)


if __name__ == "__main__":
    main()
