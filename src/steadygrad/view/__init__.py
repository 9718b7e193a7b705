"""Records -> what the user sees. Never imports torch."""
