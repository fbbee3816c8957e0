"""What differs between devices, as a table."""
