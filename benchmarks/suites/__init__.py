"""One module a suite: ``measure`` fills ``result.comparisons`` and calls ``plan.save()``."""
