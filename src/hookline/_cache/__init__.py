"""What was captured: values in memory, on disk and in a file."""
