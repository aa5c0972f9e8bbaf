"""Speed, side by side with the stock optimizers and with optax.

`python -m benchmarks.update_step`, `.train_step` and `.growth` each print a table,
write a JSON and draw a plot; `--quick` only shows that they work.
"""
