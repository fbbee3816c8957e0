"""The overflow watch: which call first makes a value that is not finite."""
