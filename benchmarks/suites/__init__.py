"""What can be measured, one module a suite: ``measure(plan, result)`` fills ``result.comparisons`` and calls ``plan.save()``."""
