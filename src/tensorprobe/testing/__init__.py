"""Runs that have to match, as tests say it: `tp.assert_match`, and a plugin of pytest."""
