"""A review of a training set: remarks on its images and captions, and a page with the worst first. Trains nothing."""
