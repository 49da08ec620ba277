"""The paper's figures for one's own model, data and runs: what `cli.analyze` measures, draws and writes."""
