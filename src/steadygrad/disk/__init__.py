"""Bytes on disk that prove themselves: written atomically, hashed, past the page cache. Independent of training."""
