"""sd-scripts' real training scripts on tiny random models: offline, on a CPU, in seconds.

The scripts are run untouched. What makes them small is the following, one module each:

- `shrink` makes the architectures that sd-scripts hard-codes small, when it imports them;
- `vocabulary` and `tokenizers` replace the tokenizers that a first run downloads;
- `checkpoints` writes random weights of those small architectures;
- `dataset` draws pictures with captions;
- `arguments` and `environment` are what to run a script with to use all of these.

`python -m kohya_ext.tiny FAMILY CHECKOUT FOLDER` writes models and tokenizers. The demo and the tests build on this.
What is trained is noise: only the way to it is real.
"""
