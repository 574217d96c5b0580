"""`python -m kohya_ext.tiny FAMILY CHECKOUT FOLDER`: see `checkpoints.write`, which runs this."""

import argparse
from pathlib import Path

from kohya_ext.tiny import checkpoints, tokenizers, weights


def main() -> None:
    """Writes what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m kohya_ext.tiny", description="Write tiny models and tokenizers.")
    parser.add_argument("family", choices=checkpoints.FAMILIES)
    parser.add_argument("checkout", type=Path, help="a checkout of kohya-ss/sd-scripts")
    parser.add_argument("folder", type=Path, help="where to write; made if missing")
    arguments = parser.parse_args()
    models = checkpoints.locate(arguments.family, arguments.folder)
    tokenizers.write(models.tokenizers)
    for path in models.files.values():
        path.parent.mkdir(parents=True, exist_ok=True)
    weights.write(arguments.family, arguments.checkout.resolve(), models.files)


if __name__ == "__main__":
    main()
