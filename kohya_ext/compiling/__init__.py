"""Compile the repeated blocks of a model: the engine behind ``--selective_torch_compile``.

- `support`: checks whether torch.compile works on this machine;
- `graph_breaks`: dynamo workarounds that let blocks be traced without graph breaks;
- `tracing`: shortcuts for slow traces;
- `lowering`: a workaround for older versions of inductor;
- `configuration`: torch settings, applied to every thread;
- `inputs`: unifies arguments, so that fewer graphs are needed;
- `fallback`: a backend that falls back to eager when a graph cannot be compiled;
- `blocks`: a compiled method, its counters and its messages.

The patch decides which classes are compiled. Importing this package does not import torch; its modules import it when used.
"""
