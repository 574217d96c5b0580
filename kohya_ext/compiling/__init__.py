"""Compiling the repeated blocks of a model: the engine behind ``--selective_torch_compile``.

- `support`: whether torch.compile can work on this machine at all;
- `tracing`: what dynamo need not trace, and how to find out what it cannot;
- `lowering`: what an older inductor fails at;
- `configuration`: torch's own settings, put where every thread sees them;
- `inputs`: arguments made alike, so that one graph does for what would take several;
- `fallback`: a backend that goes back to eager when a graph cannot be compiled;
- `blocks`: a compiled method, what is counted about it and what is said.

Which classes are compiled is said by the patch. Importing this package imports no torch; its modules do when they are used.
"""
