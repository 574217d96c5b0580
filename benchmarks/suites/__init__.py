"""What can be measured, one module a suite: its function fills ``result.comparisons`` and calls ``plan.save()``."""
