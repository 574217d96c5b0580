"""How a run starts: in an armed Python, through the launcher, below accelerate, and again after it ran out of memory."""
