"""Run sd-scripts' training scripts on tiny random models: offline, on a CPU, in seconds.

The scripts themselves are unchanged. These modules make the models small:

- `shrink` shrinks the hard-coded architectures of sd-scripts when they are imported;
- `vocabulary` and `tokenizers` replace the tokenizers that a first run downloads;
- `checkpoints` writes random weights for the small architectures;
- `dataset` draws images with captions;
- `arguments` and `environment` return the command line and the environment of a run.

`python -m kohya_ext.tiny FAMILY CHECKOUT FOLDER` writes models and tokenizers. The demo, the tests and dry runs (for their
tokenizers) use this package. The weights are random, so the trained result is useless, but the training code is real.
"""
