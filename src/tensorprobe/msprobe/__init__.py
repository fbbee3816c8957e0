"""The door for scripts of msprobe: its names, arguments, defaults and files."""
