"""The Knights-and-Knaves and math graders, and the server that offers them over HTTP."""
