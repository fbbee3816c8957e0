"""Communications between the ranks of a run: which calls belong together, and were they right."""
