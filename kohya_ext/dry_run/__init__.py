"""Estimate a command line by running its script, unchanged, on a GPU that exists only for Python.

``estimation`` starts a process (``process``) with a command line in which models, images and output are stand-ins. There the
tensors have shapes and no data: they say ``cuda:0`` to Python and ``cpu`` to C++, and the tracker of ``estimate`` logs them.
"""
