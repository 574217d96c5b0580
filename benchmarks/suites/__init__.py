"""One module per suite: ``measure`` fills ``result.comparisons`` and calls ``plan.save()``."""
