"""Estimate a command line by running its script, unchanged, on a GPU that exists only for Python.

``estimation`` returns a known estimate, or starts a process (``process``) with a command line in which missing models, images
and output are stand-ins (``arguments``, ``stand_ins``). There tensors have shapes and no data: they say ``cuda:0`` to Python
and ``cpu`` to C++ (``device``). ``tracker`` logs what they allocate and counts their kernels (``work``), ``steps`` ends the
run after three steps, and ``allocator`` replays the log as PyTorch's allocator would.
"""
