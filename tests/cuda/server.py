"""Run training scripts as forks of one process on the virtual GPU that has already imported their packages.

Reads one job per line from standard input as JSON: ``command``, ``environ``, ``folder`` and ``output``, a file for what the run
prints. Answers each with a line that holds the exit code.
"""

import importlib
import json
import os
import sys
from unittest import mock

from tests.real import starting


def main() -> None:
    # bitsandbytes asks for it when it is imported, which would start CUDA. A fork cannot start it again.
    with mock.patch("torch.cuda.get_device_capability", return_value=(8, 9)):
        for name in starting.HEAVY:
            importlib.import_module(name)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        job = json.loads(line)
        if not (child := os.fork()):
            answers.close()
            starting.run_as_interpreter(job["command"], job["environ"], job["folder"], open(job["output"], "wb"))  # noqa: SIM115
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), file=answers)


if __name__ == "__main__":
    main()
