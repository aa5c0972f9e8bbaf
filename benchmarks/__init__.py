"""Speed, side by side with the stock optimizers, with optax and with torch by hand.

`python -m benchmarks.update_step`, `.train_step` and `.growth` each print a table,
write a JSON and draw a plot; `--quick` only shows that they work.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # before anyone imports TensorFlow
