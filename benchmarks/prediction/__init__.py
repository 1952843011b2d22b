"""How far off are the predictions of `trainer predict`? docs/scaling.md."""
