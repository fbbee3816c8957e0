"""Named calls run elsewhere: on another device or in higher precision."""
