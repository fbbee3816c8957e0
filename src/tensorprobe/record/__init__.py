"""Records a program: an observer that writes its calls into a capture."""
