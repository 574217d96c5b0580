"""Show runs from their journals: as a page, and full screen. Nothing here writes, locks or signals."""
