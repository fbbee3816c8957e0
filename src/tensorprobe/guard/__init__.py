"""Overflow, NaN and errors caught at the call that makes them; one operator run elsewhere."""
