"""Records -> what a person sees. Never imports torch."""
