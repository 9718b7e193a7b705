"""Runs -> HTML pages: report and live page share the same parts. Everything read from a file is escaped."""
