"""Training programs that show the library at work, each one file, on Guard."""
