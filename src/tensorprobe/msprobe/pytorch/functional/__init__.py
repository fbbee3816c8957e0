"""Where releases of 2024 have module_dump."""
