"""Watches a running program: its calls, modules, optimizers, backward and steps."""
