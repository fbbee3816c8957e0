"""The environment of a program: collected in one file, and two of them compared."""
