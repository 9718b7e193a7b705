"""Files and folders of any format -> Contents: one file a format, and `formats.py`, which tells them apart."""
