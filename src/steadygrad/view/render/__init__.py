"""Runs -> pages of HTML: the same parts make the report and the live page. Everything that a file says is escaped."""
