"""Grades Knights-and-Knaves and math responses, in process or behind an HTTP server."""
