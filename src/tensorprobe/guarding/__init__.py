"""What the user holds: a Guard, its options and its findings."""
