"""The commands of ``python -m kohya_ext``, one module each: ``HELP`` (one line), ``configure(parser)``, ``run(args)``."""
